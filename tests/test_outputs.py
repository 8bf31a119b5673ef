"""No command writes over what it reads: held for every output and every input of every command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts.argument import Argument

from bertkit.cli.app import application, main
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.outputs import OWN_FILES, Read, Written, matches, path_mark, types_in
from docs.commands import every_command
from tests.conftest import run
from tests.test_cli import TOY

INPUTS = {"--model", "--tokenizer", "--ensemble", "--init-from", "--path", "--store"}
"""Parameters of type `Path` that are read, which the rule takes those without a mark for."""
NO_PATHS = {
    *("--task", "--format", "--column", "--device", "--precision", "--pooling", "--to"),
    *("--head", "--text", "--pair", "--label", "--choices", "--id", "--separator", "--question"),
    *("--passage", "--answers", "--words", "--tags", "--document", "--layers", "--dtype", "--init"),
    *(
        "--context",
        "--criterion",
        "--compat",
        "--language",
        "--share",
        "--machine",
        "--place",
        "--strategy",
        "--objectives.token",
        "TABLES",
    ),
    *("--objectives.pair", "--training.schedule", "--training.precision", "--track", "--metric"),
    "--training.optimizer",
    *("--class-weights", "--method", "--split", "--good", "--bad"),
}
"""Parameters of text that name no file, in the commands that write."""
COMMANDS = {
    name: [a for a in app.assemble_argument_collection() if a.parse]
    for name, app in every_command()
    if app.default_command is not None
}
WRITING = {
    name: arguments
    for name, arguments in COMMANDS.items()
    if any(isinstance(path_mark(argument), Written) for argument in arguments)
}
PAIRS = [
    (name, given, out)
    for name, arguments in WRITING.items()
    for given in arguments
    if isinstance(path_mark(given), Read)
    for out in arguments
    if isinstance(path_mark(out), Written)
]


def words_of(command: str, argument: Argument, value: Path | str) -> list[str]:
    """As on the command line; what stands before a list without a flag is given by its flag."""
    if argument.name.startswith("--"):
        return [argument.name, str(value)]
    before = {"vocab measure": ["--tokenizer", "none"], "predict": ["none"]}
    return [*before.get(command, []), str(value)]


def scenes(given: Read, out: Written, home: Path) -> Iterator[tuple[Path | str, Path]]:
    """(input, output) by which the input would be lost, or would be read with the output in it."""
    folder = home / "in"
    (folder / "deep").mkdir(parents=True)
    owned = {"data": "deep/CoLA.tsv"}.get(given.kind, "deep/config.json")
    for name in ("a.jsonl", "config.json", "vocab.txt", owned):
        (folder / name).write_text("{}")
    os.link(folder / owned, home / "second.json")
    (home / "link").symlink_to(folder)
    file = folder / "vocab.txt"
    if out.kind == "file":
        files = [(folder, folder / owned), (folder, home / "link" / owned)]
        named = [(file, file), (file, home / "link" / "vocab.txt")]
        inside = [(folder, folder / "new.json"), (folder / "*.jsonl", folder / "a.jsonl")]
        yield from {
            "text": [*named, *files, *inside, (folder, home / "second.json")],
            "own": [*named, *files, (folder, home / "second.json")],
            "data": files,
            "named": named,
        }[given.kind]
        if out.beside:
            yield folder / "a.npy.json", folder / "a.npy"
        return
    if given.kind != "named":
        yield folder, folder
        yield home / "link", folder
    if given.kind == "text":
        yield folder, folder / "new"
        yield home / "link", folder / "new"
        yield file, folder
    if out.kind == "results" and given.kind == "text":
        yield folder / "a.jsonl", folder
    if out.kind == "replaced":
        yield folder / "deep", folder


@pytest.mark.parametrize("name", sorted(WRITING))
def test_no_output_of_a_command_is_one_of_its_inputs(name: str, tmp_path: Path) -> None:
    tried, app = 0, application()
    for number, (_, given, out) in enumerate(pair for pair in PAIRS if pair[0] == name):
        read, written = path_mark(given), path_mark(out)
        assert isinstance(read, Read)
        assert isinstance(written, Written)
        for value, target in scenes(read, written, tmp_path / str(number)):
            before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            words = [*name.split(), *words_of(name, given, value), *words_of(name, out, target)]
            with pytest.raises(BertkitError) as refused:
                app.parse_args(words, exit_on_error=False, print_error=False)
            assert refused.value.code == "overwrites-input", words
            after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            assert after == before
            tried += 1
    assert tried or name == "demo"


def test_every_parameter_of_a_command_that_writes_is_known() -> None:
    """A new one has to be marked, or to be named here as an input or as no path at all."""
    marked = {name for name, *_ in PAIRS}
    assert {"clean", "doctor", "explain", "plan", "predict", "vocab measure"} <= marked
    for name, arguments in WRITING.items():
        for argument in arguments:
            kinds = set(types_in(argument.hint))
            metadata = getattr(argument.field_info.annotation, "__metadata__", ())
            if any(isinstance(mark, Read | Written) for mark in metadata):
                continue
            assert Path not in kinds or argument.name in INPUTS, (name, argument.name)
            if str in kinds and Path not in kinds:
                assert argument.name in NO_PATHS, (name, argument.name)


def test_usual_names_of_outputs_are_marked() -> None:
    for arguments in COMMANDS.values():
        for argument in arguments:
            if argument.name in {"--out", "--json", "--html", "--cache"}:
                assert isinstance(path_mark(argument), Written)


@pytest.mark.parametrize(
    "words",
    [
        "predict run new.csv --out run/found.jsonl",
        "predict run/model new.csv --out run/found.jsonl",
        "evaluate run --data data --out run/scored",
        "finetune mrpc --data data --model run --out run/mrpc",
        "finetune mrpc --data . --model run --out tuned",
        "finetune classification --train new.csv --model run --out .",
        "pretrain tiny --store run/store --out run",
        "pretrain tiny --text new.csv --out .",
        "doctor run --json run/findings.json",
        "clean new.csv --out clean.jsonl --json clean.json",
        "learn https://a.example/in.txt hf:in --out in",
        "vocab extend run/model --out extended --words new.csv",
        "explain run/model in --html run/in.html",
        "plan base --json base",
    ],
)
def test_natural_commands_are_accepted_also_the_second_time(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("run/model", "run/store", "run/scored", "run/mrpc", "data", "tuned", "extended"):
        Path(folder).mkdir(parents=True)
    files = ("new.csv", "run/found.jsonl", "run/glue.zip", "run/findings.json", "run/in.html")
    for file in (*files, "run/model/config.json", "clean.json", "glue.zip"):
        Path(file).write_text("{}")
    application().parse_args(words.split(), exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    "words",
    [
        "info . --json ../info.json",
        "predict . ../new.csv --out ../found.csv",
        "doctor . --json ../findings.json",
        "predict embed . ../new.csv --out ../vectors.npy",
    ],
)
def test_the_current_folder_and_the_root_are_inputs_too(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are paths without a name."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "new.csv").write_text("text")
    monkeypatch.chdir(tmp_path / "model")
    application().parse_args(words.split(), exit_on_error=False, print_error=False)
    over = words.rpartition(" ")[0] + " config.json"
    with pytest.raises(BertkitError) as refused:
        application().parse_args(over.split(), exit_on_error=False, print_error=False)
    assert refused.value.code == "overwrites-input"


def test_the_root_folder_and_a_folder_for_the_current_one(tmp_path: Path) -> None:
    for words in ("info / --json info.json", "export . --to onnx --out onnx"):
        given = words.replace("--json ", f"--json {tmp_path}/").replace(
            "--out ", f"--out {tmp_path}/"
        )
        application().parse_args(given.split(), exit_on_error=False, print_error=False)


def test_outputs_do_not_replace_each_other(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a")
    for out, json in (("b.jsonl", "b.jsonl"), ("b", "b/counts.json")):
        words = ["clean", str(text), "--out", str(tmp_path / out), "--json", str(tmp_path / json)]
        with pytest.raises(BertkitError) as refused:
            application().parse_args(words, exit_on_error=False, print_error=False)
        assert refused.value.code == "overwrites-output"
    (tmp_path / "folder").mkdir()
    folder = str(tmp_path / "folder")
    for words in (
        ["clean", str(text), "--out", str(tmp_path / "c"), "--json", folder],
        ["predict", "embed", "model", str(text), "--out", folder],  # with a file beside it
    ):
        with pytest.raises(BertkitError) as refused:
            application().parse_args(words, exit_on_error=False, print_error=False)
        assert refused.value.code == "folder"
    for words in (  # found at once, not after hours
        ["evaluate", "model", "data.csv", "--out", str(text)],
        ["learn", "other.txt", "--out", str(text)],
        ["evaluate", "model", "data.csv", "--out", os.devnull],
    ):
        with pytest.raises(BertkitError) as refused:
            application().parse_args(words, exit_on_error=False, print_error=False)
        assert refused.value.code == "write"


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "a.txt", "--tokenizer", "t", "--out", ""],
        ["prepare", "a.txt", "--tokenizer", "", "--out", "o"],
        ["predict", "m", "", "--out", "o"],
        ["clean", "", "--out", "o"],
    ],
)
def test_an_empty_path_is_refused(words: list[str]) -> None:
    with pytest.raises(BertkitError) as refused:
        application().parse_args(words, exit_on_error=False, print_error=False)
    assert refused.value.code == "empty-path"


@pytest.mark.parametrize("address", ["file://{}", "local://{}", "zip://inside.txt::file://{}"])
def test_an_address_of_a_local_file_is_an_input_like_its_path(address: str, tmp_path: Path) -> None:
    text = tmp_path / "text.zip"
    text.write_text("river stone\n")
    given = address.format(text)
    for words in (
        ["vocab", "measure", "tokenizer", given, "--json", str(text)],
        ["predict", "model", given, "--out", str(text)],
        ["predict", "model", f"zip://inside.csv::{text}", "--out", str(text)],
    ):
        with pytest.raises(BertkitError) as refused:
            application().parse_args(words, exit_on_error=False, print_error=False)
        assert refused.value.code == "overwrites-input"


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "model", "in.csv", "--out", "s3://bucket/out.csv"],
        ["pretrain", "--store", "store", "--out", "gs://bucket/run"],
        ["explain", "model", "text", "--html", "hf:name/page.html"],
        ["clean", "in.txt", "--out", "clean", "--json", "file:///tmp/report.json::s3://b/a"],
    ],
)
def test_an_output_that_is_remote_is_refused(words: list[str]) -> None:
    with pytest.raises(BertkitError) as refused:
        application().parse_args(words, exit_on_error=False, print_error=False)
    assert refused.value.code == "remote"


def test_a_device_is_refused_before_the_work(tmp_path: Path) -> None:
    words = ["clean", "in.txt", "--out", str(tmp_path / "clean"), "--json", os.devnull]
    with pytest.raises(BertkitError) as refused:
        application().parse_args(words, exit_on_error=False, print_error=False)
    assert refused.value.code == "write"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system has no such folder")
def test_an_open_file_of_the_process_is_not_replaced(tmp_path: Path) -> None:
    """/dev/stdout is such a link; with a redirection it leads to a file that others write, too."""
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    code = (
        "import sys; from pathlib import Path\n"
        "from bertkit.errors import BertkitError; from bertkit.files import new_file\n"
        "from bertkit.cli.app import main\n"
        "print('before', flush=True)\n"
        "try:\n    with new_file(Path(sys.argv[1])) as path: path.touch()\n"
        "except BertkitError: print('refused', flush=True)\n"
        "main(['info', 'nothing', '--json', sys.argv[1]])"
    )
    command = [sys.executable, "-c", code, str(link)]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, check=False)
    assert (tmp_path / "log").read_text() == "before\nrefused\n"
    assert done.returncode == 2
    assert "is a device or a pipe" in done.stderr
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["notes.txt/out", "notes.txt/deep/out", "closed/out"])
def test_an_output_that_cannot_be_created_is_refused_before_the_work(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("river stone\n\ncandle\n")
    (tmp_path / "closed").mkdir(mode=0o555)
    if name.startswith("closed") and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write anywhere")
    words = ["learn", str(tmp_path / "notes.txt"), "--out", str(tmp_path / name)]
    with pytest.raises(BertkitError) as refused:
        application().parse_args(words, exit_on_error=False, print_error=False)
    assert refused.value.code == "write"


def test_an_output_that_is_a_link_is_written_where_the_link_points(
    store: TokenStore, tmp_path: Path
) -> None:
    target, link = tmp_path / "elsewhere" / "found.json", tmp_path / "found.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for _ in range(2):  # the target is not there yet, and then it is
        with pytest.raises(SystemExit):
            main(["doctor", str(store.folder), "--json", str(link)])
        assert link.is_symlink()
        assert target.read_text().startswith("{")
    link.unlink()
    link.symlink_to(tmp_path / "other.txt")
    run("doctor", store.folder, "--json", link, status=2)
    assert not (tmp_path / "other.txt").exists()


def test_a_link_to_itself_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path / "loop")])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "loop") in line


def test_a_folder_that_is_a_link_is_filled_where_the_link_points(
    corpus_text: str, tmp_path: Path
) -> None:
    text, target, link = tmp_path / "a.txt", tmp_path / "big" / "disk", tmp_path / "out"
    text.write_text(corpus_text)
    target.mkdir(parents=True)
    link.symlink_to(target)
    for command in (["clean", str(text)], ["learn", str(text), "--size", "60"]):
        run(*command, "--out", link)
        assert link.is_symlink()
    assert {"part-00000.jsonl.zst", "vocab.txt"} <= {path.name for path in target.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "big", "out"}


UNREAD = ("results", "tensorboard", "report.html", "beside.json")
"""What is written for people alone."""


@pytest.mark.slow
def test_the_files_of_runs_models_and_stores_are_known(corpus_text: str, tmp_path: Path) -> None:
    text, labelled, recipe = tmp_path / "a.txt", tmp_path / "b.csv", tmp_path / "toy.toml"
    text.write_text(corpus_text)
    rows = [f"river stone {number},{number % 2}\n" for number in range(40)]
    labelled.write_text("text,label\n" + "".join(rows))
    recipe.write_text(TOY)
    trained, tuned = tmp_path / "run", tmp_path / "tuned"
    run("pretrain", recipe, "--text", text, "--vocabulary-size", "150", "--out", trained)
    run("finetune", "classification", "--train", labelled, "--model", trained, "--out", tuned)
    for folder in (trained, tuned):
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            if path.is_file() and path.name[0] != "." and not {*inside.parts} & {*UNREAD}:
                assert matches(path, OWN_FILES), inside
