"""Two tables end to end at toy size: networks, tunings, stopping, sharing, what is absent."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertkit.cli.reproduce import reproduce_command
from bertkit.console import Console
from bertkit.datasets.examples import GoldAnswer, QuestionExample, WordsExample
from bertkit.errors import BertkitError, DivergedError
from bertkit.files import exclusive_lock
from bertkit.report.pretraining import write_report
from bertkit.reproduce import run
from bertkit.reproduce.data import absent_files, load_task, sentence_pairs, some_documents
from bertkit.reproduce.experiments import EXPERIMENTS, Experiment
from bertkit.reproduce.paper import Scale, Sources, TaskScale, read_scale
from bertkit.reproduce.run import Reproduction, run_experiments
from bertkit.text.lines import TextCounts

TINY = read_scale("tiny")
TOY = replace(
    TINY,
    flags=(
        *("--phases.steps", "4", "--phases.lengths", "32", "--phases.batch-sizes", "4"),
        *("--phases.max-predictions", "5", "--training.warmup-steps", "0"),
        *("--model.num-hidden-layers", "1", "--model.hidden-size", "16"),
        *("--model.num-attention-heads", "2", "--model.max-position-embeddings", "32"),
        *("--logging.evaluate-every", "4", "--logging.held-out-sequences", "4"),
        *("--logging.log-every", "2", "--logging.checkpoint-every", "2"),
    ),
    steps=(2, 4),
    vocabulary_size=300,
    tasks={"default": TaskScale(learning_rate=1e-3, epochs=1, train=24, dev=12)},
)


@pytest.fixture
def text(tmp_path: Path) -> str:
    rng = random.Random(3)
    text = "the cat dog sat ran on a mat hill under blue red sky and it was very old"
    words = text.split()
    documents = [
        "\n".join(" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(4))
        for _ in range(500)
    ]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents))
    return str(path)


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """GLUE's SST-2 and nothing else, and SQuAD."""
    folder = tmp_path / "data" / "glue" / "SST-2"
    folder.mkdir(parents=True)
    rows = "\n".join(f"the cat sat {i}\t{i % 2}" for i in range(40))
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text(f"sentence\tlabel\n{rows}\n")
    context = "The cat sat on a mat. The dog ran under a blue sky. It was very old."
    questions = [
        {
            "id": str(i),
            "question": "Where sat the cat?",
            "answers": [{"text": "on a mat", "answer_start": context.index("on a mat")}],
        }
        for i in range(40)
    ]
    content = {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": questions}]}]}
    (tmp_path / "data" / "squad").mkdir()
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (tmp_path / "data" / "squad" / name).write_text(json.dumps(content))
    return tmp_path / "data"


def toy_scale(folder: Path) -> Path:
    """The toy scale as a file."""
    flags = json.dumps(list(TOY.flags))
    path = folder / "toy.toml"
    path.write_text(
        f'title = "toy"\nrecipe = "two-cores"\nflags = {flags}\n'
        "vocabulary_size = 300\ncased = true\n"
        "seeds = 2\nsizes = [[1, 16, 2], [2, 16, 2]]\nsteps = [2, 4]\nunits = 8\n"
        'repeated = ["2x16x2"]\n'
        "[tasks.default]\nlearning_rate = 1e-3\nepochs = 1\ntrain = 24\ndev = 12\n"
        '[stand_ins.figure-5]\nmnli-m = "squad-sentences"\n'
    )
    return path


@pytest.mark.slow
def test_a_figure_from_text_to_page(
    text: str, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Path) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    sources = Sources(text=(text,), data=labelled)
    scale = str(toy_scale(tmp_path))
    assert reproduce_command("figure-5", out=out, scale=scale, sources=sources, plan=True) == 0
    assert not (out / "text").exists()
    with monkeypatch.context() as patch:
        patch.setattr(run, "shutil", SimpleNamespace(rmtree=stop))
        with pytest.raises(KeyboardInterrupt):
            reproduce_command("figure-5", out=out, scale=scale, sources=sources)
    assert list(out.rglob("tuned/**/model.safetensors"))  # as if killed after the last score
    assert reproduce_command(out=out, render=True) == 0  # before any page was written
    assert "## Figure 5" in (out / "reproduction.md").read_text()
    assert reproduce_command("figure-5", out=out, scale=scale, sources=sources) == 0
    outcome = json.loads((out / "reproduction.json").read_text())
    [figure] = outcome["tables"]
    assert figure["columns"] == ["2", "4"]
    assert [cell["n"] for cell in figure["cells"]] == [2, 2, 2, 2]
    assert all(0 <= value <= 100 for cell in figure["cells"] for value in cell["values"])
    assert (out / "reproduction.html").read_text().count("<svg") == 1
    assert not list(out.rglob("tuned/**/model.safetensors"))
    left_to_right = out / "networks" / "left-to-right"
    config = json.loads((left_to_right / "models" / "step-00000002" / "config.json").read_text())
    assert config["is_decoder"]
    assert outcome["networks"]["left-to-right"]["held_out"]["lm_loss"] > 0
    assert str(tmp_path) not in (out / "reproduction.md").read_text()
    for folder in out.glob("tuned/*/*"):
        assert write_report(folder).is_file()

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert reproduce_command("figure-5", out=out, scale=scale, sources=sources) == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    with pytest.raises(BertkitError, match="a reproduction"):
        reproduce_command("figure-5", out=out, scale="tiny", sources=sources)
    page = (out / "reproduction.md").read_text()
    with pytest.raises(BertkitError, match="a reproduction"):
        reproduce_command("figure-5", out=out, scale="tiny", render=True)
    assert reproduce_command("table-8", out=out, render=True) == 0  # needs no sources and no scale
    assert reproduce_command(out=out, render=True) == 0  # the tables that are there
    both = (out / "reproduction.md").read_text()
    assert "## Figure 5" in page
    assert "## Figure 5" in both, "a table that was run stays on the page"
    assert "## Table 8" in both
    assert reproduce_command("table-6", out=out, scale=scale, render=True) == 0
    assert "| 2 x 16, 2 | not run |" in (out / "reproduction.md").read_text()


@pytest.mark.slow
def test_absent_data_is_said_and_the_rest_is_run(text: str, labelled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sources = Sources(text=(text,), data=labelled)
    reproduce_command("6", out=out, scale=str(toy_scale(tmp_path)), sources=sources)
    tables = json.loads((out / "reproduction.json").read_text())["tables"]
    [table] = [table for table in tables if table["key"] == "table-6"]
    by_column = {cell["column"]: cell for cell in table["cells"] if cell["row"] == "1 x 16, 2"}
    assert by_column["sst-2"]["n"] == 2
    assert by_column["perplexity"]["n"] == 1
    repeated = {cell["column"]: cell for cell in table["cells"] if cell["row"] == "2 x 16, 2"}
    assert (repeated["sst-2"]["n"], repeated["perplexity"]["n"]) == (2, 2)
    assert len(set(repeated["perplexity"]["values"])) == 2, "each seed has its own network"
    assert (out / "tuned" / "2x16x2-seed-2" / "sst-2-seed-2" / "results.json").is_file()
    assert by_column["mrpc"]["missing"] == (
        "the data folder has no MRPC; get it from https://gluebenchmark.com/tasks"
    )
    assert "Not run: the data folder has no MNLI" in (out / "reproduction.md").read_text()


class Recorded(Reproduction):
    """Work whose steps are only written down."""

    done: list[str]

    def is_done(self, step: object) -> bool:
        return step.name in self.done  # type: ignore[attr-defined]

    def is_ready(self, step: object) -> bool:
        job = step.job  # type: ignore[attr-defined]
        return job is None or f"pre-train {job.variant}" in self.done

    def run(self, step: object) -> int:
        self.done.append(step.name)  # type: ignore[attr-defined]
        return 0


def recorded(out: Path, scale: Scale, experiments: list[Experiment]) -> tuple[Recorded, list[str]]:
    work = Recorded(out, scale, Sources(data=out / "data"), "cpu", Console())
    (out / "data" / "glue").mkdir(parents=True)
    for name in ("SST-2", "MRPC"):
        (out / "data" / "glue" / name).mkdir()
        for split in ("train", "dev"):
            (out / "data" / "glue" / name / f"{split}.tsv").write_text("")
    work.done = []
    steps = work.steps(experiments)
    with exclusive_lock(work.out / "locks" / "pre-train-no-nsp"):
        # as if another process worked on this one, and finished when asked again
        work.done.append("pre-train no-nsp")
        assert run_experiments(work, steps) == 0
    return work, [step.name for step in steps]


def test_every_step_is_done_once_in_an_order_that_works(tmp_path: Path) -> None:
    experiments = [EXPERIMENTS[key](TINY) for key in ("table-5", "table-8", "figure-5")]
    work, names = recorded(tmp_path, TINY, experiments)
    assert sorted(work.done) == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        if name.startswith("tune "):
            network = f"pre-train {name.split()[1].partition('/')[0]}"
            assert work.done.index(network) < work.done.index(name)


def test_own_model_takes_the_place_of_the_scales(tmp_path: Path) -> None:
    (tmp_path / "squad").mkdir()
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (tmp_path / "squad" / name).write_text("{}")
    sources = Sources(model=tmp_path / "bert", data=tmp_path)
    work = Reproduction(tmp_path / "out", TINY, sources, "cpu", Console())
    steps = work.steps([EXPERIMENTS["table-2"](TINY)])
    assert [step.name for step in steps] == ["tune bert/squad-1.1"]
    assert work.network("bert") == tmp_path / "bert"
    assert work.steps([EXPERIMENTS["figure-5"](TINY)]) == [], "there is no text for its networks"
    work.sources = replace(sources, text=("text.txt",))
    snapshots = {step.name: step for step in work.steps([EXPERIMENTS["figure-5"](TINY)])}
    assert not work.is_done(snapshots["pre-train bert"]), "the scale's own is needed here"
    assert not work.is_ready(snapshots["tune bert/at-50-squad-sentences"])


@pytest.mark.parametrize("plan", [False, True])
def test_a_network_needs_text_before_anything_is_written(
    plan: bool, labelled: Path, tmp_path: Path
) -> None:
    out, scale = tmp_path / "out", str(toy_scale(tmp_path))
    with pytest.raises(BertkitError, match="--text"):
        reproduce_command(
            "figure-5", out=out, scale=scale, sources=Sources(data=labelled), plan=plan
        )
    assert not out.exists()


def test_rows_of_other_networks_need_text_beside_a_given_model(tmp_path: Path) -> None:
    folder = tmp_path / "conll2003"
    folder.mkdir()
    for name in ("train.txt", "valid.txt", "test.txt"):
        (folder / name).write_text("Rome B-LOC\n")
    sources = Sources(model=tmp_path / "bert", data=tmp_path)
    work = Reproduction(tmp_path / "out", TINY, sources, "cpu", Console())
    table = EXPERIMENTS["table-7"](TINY)
    steps = work.steps([table])
    assert len(steps) == 7
    assert {step.variant for step in steps} == {"bert"}
    [both] = [job for job in table.jobs if job.head.beside]
    sizes = EXPERIMENTS["table-6"](TINY)
    assert {step.variant for step in work.steps([sizes])} <= {"bert"}, "nor any for its perplexity"
    assert work.why_unrunnable(both) == (
        "there is no text to pre-train left-to-right on; give --text and choose a new --out"
    )
    work.sources = replace(sources, text=("text.txt",))
    assert len(work.steps([table])) == 10, "two networks and their job"


def test_nothing_is_pretrained_for_data_that_is_not_there(tmp_path: Path) -> None:
    work = Reproduction(tmp_path / "out", TINY, Sources(data=tmp_path), "cpu", Console())
    assert work.steps([EXPERIMENTS["table-5"](TINY)]) == []
    [*networks] = work.steps([EXPERIMENTS["table-6"](TINY)])  # perplexity needs no data
    assert [step.name for step in networks] == ["pre-train 4x32x2", "pre-train bert"]
    for wrong, message in ((None, "give --data"), (tmp_path / "nowhere", "correct --data")):
        with pytest.raises(BertkitError, match=f"to fine-tune on; {message}"):
            reproduce_command("5", out=tmp_path / "out", scale="tiny", sources=Sources(data=wrong))
    with pytest.raises(BertkitError, match="holds no reproduction to render"):
        reproduce_command(out=tmp_path / "none", render=True)
    with pytest.raises(BertkitError, match="holds no reproduction to render"):
        reproduce_command("5", out=tmp_path / "none", scale="tiny", render=True)


def test_a_network_that_diverges_leaves_the_others_alone(tmp_path: Path, labelled: Path) -> None:
    class Diverging(Recorded):
        def is_done(self, step: object) -> bool:
            return super().is_done(step) or bool(self.failure(step.name))  # type: ignore[attr-defined]

        def run(self, step: object) -> int:
            if step.name == "pre-train no-nsp":  # type: ignore[attr-defined]
                raise DivergedError("training has diverged")
            return super().run(step)

    work = Diverging(tmp_path, TINY, Sources(data=labelled), "cpu", Console())
    work.done = []
    experiment = EXPERIMENTS["table-5"](TINY)
    steps = [step for step in work.steps([experiment]) if "no-nsp/" not in step.name]
    assert run_experiments(work, steps) == 0
    assert "pre-train left-to-right" in work.done
    [job] = [j for j in experiment.jobs if (j.variant, j.task) == ("no-nsp", "sst-2")]
    assert work.why_unrunnable(job) == "no-nsp: diverged (training has diverged)"


@pytest.mark.slow
def test_a_task_whose_every_seed_diverges_leaves_the_others_alone(
    text: str, labelled: Path, tmp_path: Path
) -> None:
    """Its cell says so, and does not read as if nothing had been run."""
    scale = toy_scale(tmp_path)
    kept = scale.read_text().partition("[stand_ins")[0]
    fatal = "[tasks.sst-2]\nlearning_rate = 1e30\nbatch_size = 4\n"
    scale.write_text(f'{kept}{fatal}[stand_ins.figure-5]\nmnli-m = "sst-2"\n')
    sources = Sources(text=(text,), data=labelled)
    assert (
        reproduce_command("figure-5", out=tmp_path / "out", scale=str(scale), sources=sources) == 0
    )
    [figure] = json.loads((tmp_path / "out" / "reproduction.json").read_text())["tables"]
    assert {cell["missing"] for cell in figure["cells"]} == {"every run diverged"}
    assert "| diverged |" in (tmp_path / "out" / "reproduction.md").read_text()


def test_a_sample_is_read_where_the_official_files_are_missing(tmp_path: Path) -> None:
    folder = tmp_path / "glue" / "MNLI-10k"
    folder.mkdir(parents=True)
    rows = [
        json.dumps({"premise": f"cat {i}", "hypothesis": f"dog {i}", "label": i % 3})
        for i in range(12)
    ]
    (folder / "train.jsonl").write_text("\n".join(rows))
    assert "no MNLI" in absent_files("mnli", tmp_path), "a sample needs both files"
    (folder / "dev.jsonl").write_text("\n".join(rows[:6]))
    assert absent_files("mnli", tmp_path) == ""
    found = load_task("mnli", tmp_path, TaskScale(train=5), 64)
    assert (len(found.train), [(name, len(dev)) for name, dev in found.dev]) == (5, [("dev", 6)])
    assert {(one.text[:3], one.pair[:3]) for one in found.train} == {("cat", "dog")}
    (tmp_path / "glue" / "MNLI-10k").rename(tmp_path / "glue" / "QQP-10k")
    for split in ("train", "dev"):
        path = tmp_path / "glue" / "QQP-10k" / f"{split}.jsonl"
        shown = path.read_text().replace("premise", "question1").replace("hypothesis", "question2")
        path.write_text(shown.replace('"label": 2', '"label": 1'))
    assert load_task("qqp", tmp_path, TaskScale(), 64).task.metrics == ("f1", "accuracy")
    (tmp_path / "glue" / "MNLI").mkdir()
    assert "no MNLI" in absent_files("mnli", tmp_path), "the official folder is asked for first"


def test_settings_with_which_nothing_was_made_do_not_bind(tmp_path: Path) -> None:
    def begin(text: str) -> None:
        sources = Sources(text=(text,), data=tmp_path)
        Reproduction(tmp_path / "out", TINY, sources, "cpu", Console()).begin()

    begin("typo.txt")
    (tmp_path / "out" / "text").mkdir()
    (tmp_path / "out" / "text" / ".lock").touch()
    begin("right.txt")
    (tmp_path / "out" / "networks" / "bert").mkdir(parents=True)
    with pytest.raises(BertkitError, match="other settings"):
        begin("other.txt")


def test_what_cannot_work_is_refused_before_text_is_prepared(
    labelled: Path, tmp_path: Path
) -> None:
    out, scale = tmp_path / "out", str(toy_scale(tmp_path))
    for model, device in ((tmp_path / "no-model", "cpu"), (None, "tpu")):
        sources = Sources(text=("text.txt",), data=labelled, model=model)
        with pytest.raises(BertkitError, match=r"no-model|tpu"):
            reproduce_command("2", out=out, scale=scale, sources=sources, device=device)
    assert not out.exists()


def test_the_signal_that_stops_the_work_is_passed_on(tmp_path: Path, labelled: Path) -> None:
    class Stopped(Recorded):
        def run(self, step: object) -> int:
            return 15

    work = Stopped(tmp_path, TINY, Sources(data=labelled), "cpu", Console())
    work.done = []
    assert run_experiments(work, work.steps([EXPERIMENTS["table-6"](TINY)])) == 15


def test_whole_documents_are_drawn() -> None:
    inputs = [WordsExample(str(i), ("a",), None, i // 5, "f") for i in range(100)]
    chosen = some_documents(inputs, 22, 0)
    assert len(chosen) == 25
    assert all(sum(c.document == d for c in chosen) == 5 for d in {c.document for c in chosen})
    assert some_documents(inputs, 0, 0) is inputs


def test_sentence_pairs() -> None:
    context = "Ada lived in London. Her cat lived in Rome. They wrote letters."
    where = (GoldAnswer("London", context.index("London")),)
    questions = [
        QuestionExample(str(i), "Where did her friend Ada live?", context, where, f"f:{i}")
        for i in range(200)
    ]
    pairs = sentence_pairs(questions, 0, TextCounts())
    assert len(pairs) == 200
    by_label: dict[object, set[object]] = {}
    for pair in pairs:
        by_label.setdefault(pair.label, set()).add(pair.pair)
    assert by_label == {
        "entailment": {"Ada lived in London."},
        "not_entailment": {"Her cat lived in Rome.", "They wrote letters."},
    }
    assert 70 < sum(pair.label == "entailment" for pair in pairs) < 130
    assert pairs == sentence_pairs(questions, 0, TextCounts())
    counts = TextCounts()
    sentence_pairs([questions[0], questions[0]._replace(context="London.")], 0, counts)
    assert counts.skipped == {"question without a sentence to ask about": 1}
    lonely = questions[0]._replace(context="Ada lived in London.")
    with pytest.raises(BertkitError, match="no paragraph of two or more sentences"):
        sentence_pairs([lonely], 0, TextCounts())


def test_a_reproduction_begun_before_a_field_was_there_resumes(tmp_path: Path) -> None:
    out, sources = tmp_path / "out", Sources(text=("text.txt",), data=tmp_path)
    work = Reproduction(out, TINY, sources, "cpu", Console())
    work.begin()
    (out / "networks" / "bert").mkdir(parents=True)
    recorded = json.loads((out / "reproduce.json").read_text())
    for task in recorded["scale"]["tasks"].values():
        del task["frozen_learning_rate"]
    (out / "reproduce.json").write_text(json.dumps(recorded))
    work.begin()
    other = Reproduction(out, replace(TINY, seeds=9), sources, "cpu", Console())
    with pytest.raises(BertkitError, match="other settings"):
        other.begin()
    (out / "networks" / "bert").rmdir()
    other.begin()  # nothing was made of the first


def test_absent_files(labelled: Path) -> None:
    assert absent_files("sst-2", labelled) == ""
    assert absent_files("squad-sentences", labelled) == ""
    assert absent_files("squad-2.0", labelled).startswith("the data folder has no squad-2.0 (")
    assert "CoLA" in absent_files("cola", labelled)
