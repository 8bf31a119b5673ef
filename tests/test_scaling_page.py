"""docs/scaling.md: its job files are well formed, and its commands are accepted."""

from __future__ import annotations

import shlex
import subprocess

import pytest
import yaml

from bertkit.cli.app import application
from bertkit.cli.launch import parse_words
from tests.markdown import ROOT, blocks, commands

PAGE = (ROOT / "docs" / "scaling.md").read_text()


def pretrainings() -> list[list[str]]:
    """The part of each `bertkit launch` that its processes run."""
    found = [words for words in commands(PAGE) if words[:2] == ["bertkit", "launch"]]
    return [parse_words(words[2:]).words for words in found]


def test_the_page_launches_on_one_machine_and_on_several() -> None:
    launched = [words for words in commands(PAGE) if words[:2] == ["bertkit", "launch"]]
    assert {"--nproc-per-node", "--nnodes"} <= {word for words in launched for word in words}


@pytest.mark.parametrize("words", pretrainings(), ids=" ".join)
def test_what_is_launched_is_accepted(words: list[str]) -> None:
    application().parse_args(words, exit_on_error=False, print_error=False)


def test_the_slurm_script_is_well_formed() -> None:
    [script] = blocks(PAGE, "bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    options = [line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    assert all(option.startswith("--") for option in options)
    launched = script.replace("\\\n", " ").split("bertkit launch", 1)[1]
    words = parse_words(
        shlex.split(launched.replace("$SLURM_NNODES", "2").replace("$first", "host"))
    ).words
    application().parse_args(words, exit_on_error=False, print_error=False)


def test_the_kubernetes_job_is_well_formed() -> None:
    [text] = blocks(PAGE, "yaml")
    job, service = yaml.safe_load_all(text)
    assert (job["kind"], service["kind"]) == ("Job", "Service")
    [container] = job["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    assert words[0] == "launch"
    pretraining = parse_words(words[1:]).words
    application().parse_args(pretraining, exit_on_error=False, print_error=False)
    endpoint = next(word for word in words if word.startswith("--rdzv-endpoint="))
    host = endpoint.removeprefix("--rdzv-endpoint=").split(":")[0]
    name = job["metadata"]["name"]
    assert host == f"{name}-0.{job['spec']['template']['spec']['subdomain']}"
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
