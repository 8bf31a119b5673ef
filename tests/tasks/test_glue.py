"""GLUE's files, as they are downloaded and as the server takes them."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import pytest
from bertkit.cli.submit import submit_command
from bertkit.datasets.benchmarks import DataFiles, glue_columns
from bertkit.datasets.columns import TextColumns
from bertkit.datasets.submissions import HEADER, ZIPPED, write_glue_zip, write_submission

from bertkit.errors import BertkitError
from bertkit.predict.evaluate import evaluate
from bertkit.tasks.data import glue_dataset
from bertkit.tasks.official import GLUE, glue_task, read_glue
from bertkit.tasks.texts import TextExample
from bertkit.tasks.windows import WindowLengths
from bertkit.text.lines import TextCounts
from tests.conftest import run

OFFICIAL = {
    "cola": (8551, 1043, 1063),
    "mrpc": (3668, 408, 1725),
    "rte": (2490, 277, 3000),
    "sst-2": (67349, 872, 1821),
    "sts-b": (5749, 1500, 1379),
}
DIAGNOSTIC = (
    "Lexical Semantics\tPredicate-Argument Structure\tLogic\tKnowledge\tDomain"
    "\tPremise\tHypothesis\tLabel\n"
    "\t\tNegation\t\tArtificial\tThe cat sat.\tThe cat did not sit.\tcontradiction\n"
    '\t\tNegation\t\tArtificial\tThe "cat sat.\tThe cat sat.\tentailment\n'
    "Quantifiers\t\t\t\tNews\tThe cat did sit.\tA cat sat.\tneutral\n"
)
TAB = "\t"
MNLI_HEAD = "index\tpromptID\tgenre\tsentence1\tsentence2"


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(name: str, folder: Path, split: str) -> tuple[list[TextExample], TextCounts]:
    counts = TextCounts()
    return read_glue(name, folder, split, counts), counts


# The table ---------------------------------------------------------------------------------------


def test_the_table_is_whole() -> None:
    assert " ".join(GLUE) == "cola sst-2 mrpc sts-b qqp mnli qnli rte wnli ax"
    for name, task in GLUE.items():
        assert len(task.labels) == len(set(task.labels)) == len(task.file_labels)
        assert task.task_type == ("regression" if name == "sts-b" else "classification")
        assert set(task.submissions) <= set(task.files)
        assert set(task.metrics) <= {"accuracy", "f1", "matthews", "pearson", "spearman"}
        assert ("f1" in task.metrics) == (name in ("mrpc", "qqp"))
    names = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm QNLI RTE WNLI AX"
    assert " ".join(ZIPPED).replace(".tsv", "") == names
    assert glue_task("SST-2") is GLUE["sst-2"]
    with pytest.raises(BertkitError, match="GLUE has no task 'mprc'; did you mean 'mrpc'"):
        glue_task("mprc")


# Reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_files(data: Path, name: str) -> None:
    task = GLUE[name]
    for split, size in zip(("train", "dev", "test"), OFFICIAL[name], strict=True):
        inputs, counts = read(name, data / "glue", split)
        assert len(inputs) == size
        assert not counts.skipped
        assert [given.id for given in inputs] == [str(number) for number in range(size)]
        assert all((given.pair is None) == (not task.pair) for given in inputs)
        labels = {given.label for given in inputs}
        if split == "test":
            assert labels == {None}
            assert task.submissions[split][1] == size
        elif name == "sts-b":
            assert all(isinstance(label, float) and 0 <= label <= 5 for label in labels)
        else:
            assert labels == set(task.labels)


def test_official_quirks(data: Path) -> None:
    glue = data / "glue"
    mrpc, _ = read("mrpc", glue / "MRPC", "dev")  # the task's own folder; byte order mark; quotes
    assert mrpc[0].pair is not None
    assert mrpc[0].pair.startswith('"The foodservice')
    assert mrpc[0].label == "equivalent"
    cola, _ = read("cola", glue, "dev")  # no header
    assert cola[0].text.startswith("The sailors rode")
    assert cola[0].location.endswith("dev.tsv:1")
    # the accuracy of the larger class, as the literature gives it for these sets
    assert [given.label for given in cola].count("acceptable") / 1043 == pytest.approx(
        0.691, abs=1e-3
    )
    assert [given.label for given in mrpc].count("equivalent") / 408 == pytest.approx(
        0.684, abs=1e-3
    )


def test_mnli_splits_and_rows_without_agreement(tmp_path: Path) -> None:
    folder = tmp_path / "glue" / "MNLI"
    head = f"{MNLI_HEAD}\tlabel1\tgold_label\n"
    write(
        folder, "dev_matched.tsv", f"{head}0\t1\tg\tA\tB\tneutral\tneutral\n1\t2\tg\tA\tB\tx\t-\n"
    )
    write(folder, "dev_mismatched.tsv", f"{head}0\t1\tg\tC\tD\tx\tcontradiction\n")
    write(folder, "test_mismatched.tsv", f"{MNLI_HEAD}\n0\t1\tg\tE\tF\n")
    inputs, counts = read("mnli", tmp_path / "glue", "dev")
    assert [(given.text, given.pair, given.label) for given in inputs] == [("A", "B", "neutral")]
    assert counts.skipped == {"row without a majority label": 1}
    assert read("mnli", folder, "dev-mismatched")[0][0].label == "contradiction"
    assert read("mnli", folder, "test-mismatched")[0][0].label is None
    with pytest.raises(BertkitError, match="MNLI has no split 'dev_matched'; did you mean 'dev"):
        read("mnli", folder, "dev_matched")


def test_qqp_rows_with_missing_columns(tmp_path: Path) -> None:
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    rows = "9\t1\t2\tWhat?\tWhich?\t1\n9\t1\t2\tWhat?\n9\t1\t2\tWhat?\t\t0\n"
    path = write(tmp_path / "qqp", "dev.tsv", head + rows)
    inputs, counts = read("QQP", tmp_path, "dev")
    assert [(given.id, given.label) for given in inputs] == [
        ("0", "duplicate"),
        ("2", "not_duplicate"),
    ]
    assert counts.skipped == {"row with fewer fields than the first line": 1, "empty text, kept": 1}
    assert counts.examples["row with fewer fields than the first line"] == f"{path}:3"
    write(tmp_path / "qqp", "test.tsv", "id\tquestion1\tquestion2\n0\ta\tb\n1\ta\n")
    with pytest.raises(BertkitError, match=r"test\.tsv:3: row with fewer.* every row of a"):
        read("qqp", tmp_path, "test")


def test_qnli_asks_first_and_numbers_its_test_set(tmp_path: Path) -> None:
    head = "index\tquestion\tsentence"
    rows = '7\tWho "sang?\tA sailor.\tentailment\n9\tWhere?\tIt froze.\tnot_entailment\n'
    write(tmp_path / "QNLI", "train.tsv", f"{head}\tlabel\n{rows}")
    write(tmp_path / "QNLI", "test.tsv", f"{head}\n4\tWhen?\tIn winter.\n2\tWhy?\tOf ice.\n")
    train, counts = read("qnli", tmp_path, "train")
    assert [given[:4] for given in train] == [
        ("0", 'Who "sang?', "A sailor.", "entailment"),
        ("1", "Where?", "It froze.", "not_entailment"),
    ]
    assert not counts.skipped
    assert [given[:4] for given in read("qnli", tmp_path, "test")[0]] == [
        ("4", "When?", "In winter.", None),
        ("2", "Why?", "Of ice.", None),
    ]


def test_the_diagnostic_set(tmp_path: Path) -> None:
    text = "index\tsentence1\tsentence2\n0\tThe cat.\tA cat.\n"
    for folder, name in (("diagnostic", "diagnostic.tsv"), ("AX", "AX.tsv")):
        write(tmp_path / folder, name, text)
        [given] = read("ax", tmp_path / folder, "test")[0]
        assert given[:4] == ("0", "The cat.", "A cat.", None)
    with pytest.raises(BertkitError, match=r"no diagnostic-full\.tsv .*benchmark.com/diag"):
        read("ax", tmp_path, "dev")
    write(tmp_path / "diagnostic", "diagnostic-full.tsv", DIAGNOSTIC)
    found = [given[:4] for given in read("ax", tmp_path, "dev")[0]]
    assert found[0] == ("0", "The cat sat.", "The cat did not sit.", "contradiction")
    assert [label for *_, label in found] == ["contradiction", "entailment", "neutral"]


@pytest.mark.parametrize("folder", ["WNLI", "wnli", "WNLI_"])
def test_folders_in_any_case_and_readable_names(tmp_path: Path, folder: str) -> None:
    text = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n1\ta\tb\t0\n"
    write(tmp_path / folder, "train.tsv", text)
    labels = [given.label for given in read("wnli", tmp_path, "train")[0]]
    assert labels == ["entailment", "not_entailment"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "rte",
            "index\tsentence1\tlabel\n0\ta\tb\n",
            r"train\.tsv has no column 'sentence2' \(col",
        ),
        (
            "rte",
            "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n",
            r"tsv:2: '1' is not a label of RTE",
        ),
        ("cola", "sentence\tlabel\none\t1\n", r"train\.tsv:1: row with 2 fields instead of 4"),
        (
            "cola",
            "source\tlabel\tx\tsentence\ng\t1\t\tone\n",
            r"train\.tsv:1: 'label' is not a label",
        ),
        ("sst-2", "sentence\tlabel\n", r"train\.tsv has no rows; get it again"),
        ("sts-b", "sentence1\tsentence2\tscore\na\tb\t\n", r"tsv:2: 'score' is '', not a finite"),
    ],
)
def test_other_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    write(tmp_path, "train.tsv", text)
    with pytest.raises(BertkitError, match=message):
        read(name, tmp_path, "train")


def test_absent_data_names_the_place(tmp_path: Path) -> None:
    message = r"no train\.tsv of RTE in .*glue; get RTE from https://gluebenchmark.com/tasks and "
    with pytest.raises(BertkitError, match=message + r"unpack it so that .*RTE.train\.tsv exists$"):
        read("rte", tmp_path / "glue", "train")
    with pytest.raises(BertkitError, match=r"tasks and .*MRPC.dev\.tsv exists; Microsoft has the"):
        read("mrpc", tmp_path, "dev")
    own = tmp_path / "cola"
    own.mkdir()
    with pytest.raises(BertkitError, match=r"that \S*/cola/dev\.tsv exists"):
        read("cola", own, "dev")


# Writing -----------------------------------------------------------------------------------------


def test_submissions_in_the_servers_spelling(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    write_submission("mrpc", "test", ["1", "0"], ["equivalent", "not_equivalent"], path)
    assert path.read_text() == "index\tprediction\n0\t0\n1\t1\n"
    write_submission("mnli", "test-mismatched", ["0"], ["neutral"], path)
    assert path.read_text() == "index\tprediction\n0\tneutral\n"
    write_submission("wnli", "test", ["0"], ["entailment"], path)
    assert path.read_text() == "index\tprediction\n0\t1\n"
    write_submission("sts-b", "test", ["0", "1", "2"], [-0.2, 5.5, 3.14159], path)
    assert path.read_text() == "index\tprediction\n0\t0.000\n1\t5.000\n2\t3.142\n"


@pytest.mark.parametrize(
    ("name", "split", "ids", "predictions", "message"),
    [
        ("rte", "test", ["0", "2"], ["entailment"] * 2, r"RTE submission are 0 to 1, not '2'"),
        ("rte", "test", ["0", "0"], ["entailment"] * 2, "0 to 1, not one of them twice"),
        ("rte", "test", ["0"], ["entails"], "'entails' is not a label of RTE; did you mean"),
        ("rte", "test", ["0"], [], "0 predictions for 1 IDs of RTE"),
        ("rte", "dev", ["0"], ["entailment"], "the server takes no 'dev' of RTE"),
        ("sts-b", "test", ["0"], [math.nan], "a prediction for STS-B is nan, not a finite number"),
    ],
)
def test_bad_submissions(
    tmp_path: Path, name: str, split: str, ids: list[str], predictions: list[str], message: str
) -> None:
    with pytest.raises(BertkitError, match=message):
        write_submission(name, split, ids, predictions, tmp_path / "x.tsv")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def submission(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All eleven files, of the right length."""
    folder = tmp_path_factory.mktemp("submission")
    for task in GLUE.values():
        for split, (file, rows) in task.submissions.items():
            predictions = [task.labels[0] if task.labels else 2.5] * rows
            name = next(key for key in GLUE if GLUE[key] is task)
            write_submission(name, split, [str(i) for i in range(rows)], predictions, folder / file)
    return {path.name: path for path in sorted(folder.iterdir())}


def test_the_archive(submission: dict[str, Path], tmp_path: Path) -> None:
    assert write_glue_zip(submission, tmp_path / "a.zip") == []
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == set(submission)
        for name, path in submission.items():
            assert archive.read(name) == path.read_bytes()
    backwards = dict(reversed(submission.items()))
    write_glue_zip(backwards, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_wnli_is_filled_and_said(submission: dict[str, Path], tmp_path: Path) -> None:
    given = {name: path for name, path in submission.items() if name != "WNLI.tsv"}
    [remark] = write_glue_zip(given, tmp_path / "a.zip")
    assert "WNLI.tsv was filled with 0" in remark
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        lines = archive.read("WNLI.tsv").decode().splitlines()
    assert lines == ["index\tprediction", *(f"{number}\t0" for number in range(146))]
    del given["RTE.tsv"]
    with pytest.raises(BertkitError, match=r"missing: RTE\.tsv"):
        write_glue_zip(given, tmp_path / "b.zip")
    assert not (tmp_path / "b.zip").exists()


def test_all_problems_are_in_one_line(submission: dict[str, Path], tmp_path: Path) -> None:
    rte = submission["RTE.tsv"].read_text()
    stsb = submission["STS-B.tsv"].read_text()
    given = {
        "RTE.tsv": write(tmp_path, "r", rte.replace("2999\tentail", "3000\tentail")),
        "STS-B.tsv": write(tmp_path, "s", stsb.replace("7\t2.500", "7\tnan", 1)),
        "CoLA.tsv": write(tmp_path, "c", submission["CoLA.tsv"].read_text() + "1063\t0\n"),
        "AX.tsv": write(tmp_path, "a", "id\tlabel\n"),
        "MRPC.tsv": write(
            tmp_path, "m", submission["MRPC.tsv"].read_text().replace("\n4\t0", "\n4\t2")
        ),
        "QNLI.tsv": submission["QNLI.tsv"],
    }
    with pytest.raises(BertkitError) as caught:
        write_glue_zip(given, tmp_path / "a.zip")
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "missing: SST-2.tsv, QQP.tsv, MNLI-m.tsv, MNLI-mm.tsv",
        "RTE.tsv:3001: index '3000' instead of 2999",
        "STS-B.tsv:9: prediction 'nan' is not allowed",
        "CoLA.tsv: 1064 predictions instead of 1063",
        "AX.tsv:1: the header is not index and prediction",
        "MRPC.tsv:6: prediction '2' is not allowed",
    ):
        assert part in message
    assert "QNLI" not in message
    assert not (tmp_path / "a.zip").exists()
    for score in ("2_5", " 2.5", "5.001", "-0.1", ""):  # Python reads the first two as numbers
        bad = write(tmp_path, "s", stsb.replace("7\t2.500", f"7\t{score}", 1))
        with pytest.raises(BertkitError, match=rf"STS-B\.tsv:9: prediction '{score}' is not"):
            write_glue_zip({"STS-B.tsv": bad}, tmp_path / "a.zip")
    best = write(tmp_path, "s", stsb.replace("7\t2.500", "7\t5.000", 1))
    assert write_glue_zip(submission | {"STS-B.tsv": best}, tmp_path / "a.zip") == []


def test_unknown_and_absent_files(submission: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match=r"no file 'Cola\.tsv'; did you mean 'CoLA\.tsv'"):
        write_glue_zip({"Cola.tsv": submission["CoLA.tsv"]}, tmp_path / "a.zip")
    with pytest.raises(BertkitError, match=r"cannot read .*nosuch"):
        write_glue_zip({"CoLA.tsv": tmp_path / "nosuch"}, tmp_path / "a.zip")


# From files to the archive -----------------------------------------------------------------------

MNLI_ROWS = "0\t1\tg\tThe river.\tA stone.\tneutral\n1\t2\tg\tA bridge.\tA bridge.\tentailment\n"
PAIR_ROWS = "0\t{0}river?\tA stone.\t{1}\n1\t{0}bridge.\tA bridge.\t{2}\n"
SLICES = {
    "mnli": (f"{MNLI_HEAD}\tgold_label\n", MNLI_ROWS, "2\t3\tg\tA kettle.\tNone.\tcontradiction\n"),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n",
        PAIR_ROWS.format("3\t4\t", "0", "1"),
        "",
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n",
        PAIR_ROWS.format("", "not_entailment", "entailment"),
        "",
    ),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n", PAIR_ROWS.format("", "0", "1"), ""),
}


def write_slices(folder: Path, name: str) -> Path:
    """Some rows of every file of a task; of QQP, test files lack the questions' own IDs."""
    head, rows, more = SLICES[name]
    for split, files in GLUE[name].files.items():
        text = head + rows + more
        if split.startswith("test"):
            text = "".join(f"{line.rpartition(TAB)[0]}\n" for line in text.splitlines())
            text = text.replace("\tqid1\tqid2", "").replace("\t3\t4", "")
        write(folder / GLUE[name].folder, files[0], text)
    return folder


@pytest.fixture(scope="module")
def mnli(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one step on three pairs of MNLI."""
    folder = tmp_path_factory.mktemp("mnli")
    run("finetune", "mnli", "--data", write_slices(folder / "glue", "mnli"), "--model", pretrained,
        "--out", folder / "run", "--epochs", "1")  # fmt: skip
    return folder / "run"


def test_two_dev_sets_and_two_test_sets(mnli: Path) -> None:
    scores = json.loads((mnli / "results.json").read_text())["scores"]
    assert list(scores) == ["dev", "dev-mismatched"]
    assert set(scores["dev"]) == {"accuracy"}
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv"):
        head, *lines = (mnli / "results" / name).read_text().splitlines()
        assert (head, len(lines)) == (HEADER, 3)
        assert {line.split("\t")[1] for line in lines} <= set(GLUE["mnli"].labels)
    found = [path.name for path in sorted((mnli / "results").iterdir())]
    assert [name for name in found if name.startswith("dev")] == [
        "dev-mismatched.jsonl",
        "dev.jsonl",
    ]


def test_predict_knows_the_columns_of_the_models_set(
    mnli: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_slices(tmp_path / "glue", "mnli")
    out = tmp_path / "found.jsonl"
    for split in ("dev", "test"):
        file = data / "MNLI" / f"{split}_matched.tsv"
        run("evaluate", mnli, "--data", data, "--split", split, "--out", tmp_path)
        run("predict", mnli, file, "--out", out)
        official, own = (
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in (tmp_path / f"{split}.jsonl", out)
        )
        for one, other in zip(official, own, strict=True):
            assert (one["text"], one["pair"]) == (other["sentence1"], other["sentence2"])
            assert (one["label"], one["probability"]) == (other["label"], other["probability"])
    usual = write(tmp_path, "mine.csv", "text,other\nA river.,A stone.\n")
    run("predict", mnli, usual, "--pair", "other", "--out", out)
    capsys.readouterr()
    run("predict", mnli, data / "MNLI" / "dev_matched.tsv", "--text", "sentence2", "--pair",
        "sentence1")  # fmt: skip
    assert json.loads(capsys.readouterr().out.splitlines()[0])["text"] == "A stone."


def test_columns_that_no_set_has_are_named(tmp_path: Path) -> None:
    """CoLA's labelled files begin with a row, SST-2's and one's own have a header."""
    cola = str(write(tmp_path, "dev.tsv", "gj04\t1\t\tThe river froze.\n"))
    message = r"neither a column 'text' nor 'sentence' as cola; .* bertkit evaluate MODEL"
    with pytest.raises(BertkitError, match=message):
        glue_columns("cola", cola, TextColumns())
    sst = str(write(tmp_path, "test.tsv", "index\tsentence\n0\tA river.\n"))
    found = glue_columns("sst-2", sst, TextColumns())
    assert (found.text, found.pair) == ("sentence", "")
    both = str(write(tmp_path, "both.csv", "sentence,text\na,b\n"))
    assert glue_columns("sst-2", both, TextColumns()).text == "text"


@pytest.mark.parametrize("name", ["qqp", "qnli", "wnli"])
def test_tasks_from_files_to_files(name: str, pretrained: Path, tmp_path: Path) -> None:
    data = write_slices(tmp_path, name)
    out = tmp_path / "run"
    run("finetune", name, "--data", data, "--model", pretrained, "--out", out, "--epochs", "1")
    [(split, scores)] = json.loads((out / "results.json").read_text())["scores"].items()
    assert (split, tuple(scores)) == ("dev", GLUE[name].metrics)
    [(file, _)] = GLUE[name].submissions.values()
    head, *lines = (out / "results" / file).read_text().splitlines()
    assert (head, len(lines)) == (HEADER, 2)
    assert {line.split("\t")[1] for line in lines} <= set(GLUE[name].file_labels)


def test_absent_test_files_are_counted(tmp_path: Path) -> None:
    data = write_slices(tmp_path, "mnli")
    (data / "MNLI" / "test_mismatched.tsv").unlink()
    found = glue_dataset("mnli", DataFiles(data=data), WindowLengths(), 40)
    assert [name for name, _ in found.dev] == ["dev", "dev-mismatched"]
    assert [name for name, _ in found.test] == ["test"]
    assert found.counts.skipped == {"test-mismatched file is absent: nothing to submit": 1}
    with pytest.raises(
        BertkitError, match="ax has no training data: fine-tune on mnli, then bertkit ev"
    ):
        glue_dataset("ax", DataFiles(data=data), WindowLengths(), 40)


def test_the_diagnostic_set_is_scored_and_predicted(
    mnli: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{number}\tThe cat.\tA cat.\n" for number in range(3))
    write(tmp_path, "diagnostic.tsv", f"index\tsentence1\tsentence2\n{rows}")
    write(tmp_path, "diagnostic-full.tsv", DIAGNOSTIC)
    out = tmp_path / "out"
    run("evaluate", mnli, "--task", "ax", "--data", tmp_path, "--out", out)
    assert "ax dev: matthews " in capsys.readouterr().out
    assert set(json.loads((out / "dev-scores.json").read_text())) == {"matthews"}
    run("evaluate", mnli, "--task", "ax", "--data", tmp_path, "--split", "test", "--out", out)
    assert (out / "AX.tsv").read_text().startswith(f"{HEADER}\n0\t")
    with pytest.raises(BertkitError) as caught:  # whatever the model would answer
        evaluate(mnli, task="rte", data=tmp_path, split="test", unlabelled_ok=True)
    assert caught.value.code == "label"


def test_submit(
    submission: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, path in submission.items():
        if name != "WNLI.tsv":
            write(tmp_path / "runs" / name[:3] / "results", name, path.read_text())
    write(tmp_path / "runs" / "data", "train.tsv", "other files are passed over")
    runs, out = tmp_path / "runs", tmp_path / "glue.zip"
    run("submit", runs, "--out", out)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("WNLI.tsv was filled with 0")
    assert said[1:] == [f"{out}: 11 files, 10 of them from these runs"]
    with zipfile.ZipFile(out) as archive:
        assert set(archive.namelist()) == set(submission)
    submit_command(runs, runs / "CoL", out=out)  # a folder inside another is read once
    again = write(tmp_path / "again", "CoLA.tsv", "")
    with pytest.raises(BertkitError, match=r"again.CoLA\.tsv and .* are both CoLA\.tsv; name one"):
        submit_command(runs, again.parent, out=out)
    with pytest.raises(BertkitError, match="nowhere is not a folder"):
        submit_command(tmp_path / "nowhere", out=out)
