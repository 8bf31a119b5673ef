"""The newcomer of benchmarks/newcomer.py: pages become steps, and surprises are noticed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from bertkit.datasets.benchmarks import DataFiles
from bertkit.datasets.columns import TextColumns

from benchmarks import newcomer
from benchmarks.newcomer import SKIPPED, START, Newcomer, SurpriseError, status_of
from benchmarks.newcomer_pages import GIVEN, STAND_INS, missing_output, placeholders_of, steps_of
from bertkit.tasks.data import load_dataset
from bertkit.text.documents import TextCounts, find_sources, read_documents
from tests.markdown import ROOT, blocks, commands

PAGES = {name: (ROOT / name).read_text() for name in newcomer.PAGES}

PAGE = """# A page

Save this as `hello.txt`:

```text
hello
```

To try it, add `--small 3` to `bertkit pretrain`.

```
python3 -c "print(open('hello.txt').read())"   # a comment
bertkit pretrain base \\
    --out CORPUS
```

```text
hel…
```

```json
{"not": "a step"}
```

```python
print("[MASK]")
```
"""


def of_kind(text: str, kind: str) -> list[str]:
    return [step.text for step in steps_of(text) if step.kind == kind]


def test_a_page_becomes_steps() -> None:
    found = [(step.kind, step.line, step.text, step.name) for step in steps_of(PAGE)]
    assert found == [
        ("file", 6, "hello\n", "hello.txt"),
        ("command", 12, "python3 -c \"print(open('hello.txt').read())\"   # a comment", ""),
        ("command", 13, "bertkit pretrain base --out CORPUS --small 3", ""),
        ("output", 18, "hel…\n", ""),
        ("python", 26, 'print("[MASK]")\n', ""),
    ]
    assert placeholders_of(steps_of(PAGE)) == {"CORPUS"}


def test_a_line_that_is_no_command_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 3 stands among commands and is none: learn x"):
        steps_of("```\nbertkit learn a\nlearn x\n```\n")


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_the_pages_is_a_step(name: str) -> None:
    """What tests/markdown.py finds, which knows nothing of steps, and every Python block."""
    text = PAGES[name]
    taken = [shlex.split(command, comments=True) for command in of_kind(text, "command")]
    for words in commands(text):
        assert any(step[: len(words)] == words for step in taken), words
    saved = of_kind(text, "file")
    assert of_kind(text, "python") == blocks(text, "python")
    assert len(taken) > 2
    assert all(text.count(content) for content in saved)


@pytest.mark.parametrize("name", PAGES)
def test_every_placeholder_of_the_pages_is_known(name: str) -> None:
    assert placeholders_of(steps_of(PAGES[name])) <= set(STAND_INS) | GIVEN


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README.md"])
def test_files_that_commands_read_are_saved_before(name: str) -> None:
    saved: set[str] = set()
    for step in steps_of(PAGES[name]):
        if step.kind == "file":
            saved.add(step.name)
        elif step.kind == "command":
            for file in re.findall(r"(?<!\S)[a-z-]+\.(?:csv|txt|json|jsonl)(?!\S)", step.text):
                assert file in saved | {"constraints.txt"}, f"{name}:{step.line}: {file}"


def test_what_is_left_out_is_on_its_page() -> None:
    for name, left_out in SKIPPED.items():
        steps = of_kind(PAGES[name], "command")
        for beginning in left_out:
            assert any(text.startswith(beginning) for text in steps), (name, beginning)


def test_output_is_compared_by_its_shape() -> None:
    printed = "begin\n  loss 3.25, 7 steps  \nend"
    assert missing_output("loss …, … steps\nend\n", printed) == []
    assert missing_output("loss …, … updates\nend\n", printed) == ["loss …, … updates"]
    assert missing_output("a.c\n", "abc") == ["a.c"]


def test_statuses() -> None:
    assert status_of("bertkit doctor runs/store") == (0, 1)
    assert status_of("bertkit learn a") == (0,)


def follow(text: str, folder: Path, name: str = "page.md") -> dict[str, object]:
    """A page followed with this Python."""
    given = Newcomer(folder, Path(sys.executable).parent, None)
    return given.follow(name, text)


def test_a_page_is_followed(tmp_path: Path) -> None:
    text = PAGE.replace("bertkit pretrain base \\\n    --out CORPUS\n", "")
    row = follow(text, tmp_path)
    assert (row["commands"], row["python_blocks"], row["skipped"]) == (1, 1, 0)
    assert row["first_result_seconds"] == pytest.approx(row["seconds"], abs=0.2)
    assert (tmp_path / "page" / "hello.txt").read_text() == "hello\n"


@pytest.mark.parametrize(
    ("command", "output", "message"),
    [
        ("python3 -c 'raise SystemExit(3)'", "", r"page\.md:2: status 3"),
        ("python3 -c 'print(\"SomeWarning: x\")'", "", r"page\.md:2: SomeWarning"),
        ("python3 -c 'print(1)'", "2", r"page\.md:6: not printed: 2"),
        ("bertkit serve --port 0 nowhere", "", r"page\.md:2: no server"),
    ],
)
def test_surprises_name_page_and_line(
    command: str, output: str, message: str, tmp_path: Path
) -> None:
    text = f"```\n{command}\n```\n\n```text\n{output}\n```\n"
    with pytest.raises(SurpriseError, match=message):
        follow(text, tmp_path)


def test_installing_is_left_out_where_the_environment_is_given(tmp_path: Path) -> None:
    installing = next(block for block in blocks(PAGES[START], "") if "pip install" in block)
    row = follow(f"```\n{installing}```\n", tmp_path)
    assert (row["commands"], row["skipped"]) == (0, 3)


def test_stand_ins_are_what_they_stand_for(tmp_path: Path) -> None:
    for name, make in STAND_INS.items():
        make(tmp_path / name)
    counts = TextCounts()
    sources = find_sources([str(tmp_path / "CORPUS")])
    documents = [text for source in sources for text in read_documents(source, counts)]
    assert len(documents) > 50
    assert not counts.skipped
    table = DataFiles(train=str(tmp_path / "TRAIN.csv"), dev=str(tmp_path / "DEV.csv"))
    for name, files, columns in (
        ("mrpc", DataFiles(data=tmp_path / "GLUE"), None),
        ("squad-2.0", DataFiles(data=tmp_path / "SQUAD"), None),
        ("conll-2003", DataFiles(data=tmp_path / "CONLL"), None),
        ("classification", table, TextColumns(text="title", label="topic")),
    ):
        dataset = load_dataset(name, files, columns, None, 128)
        assert len(dataset.train) > 3, name
        assert not dataset.counts.skipped, name
