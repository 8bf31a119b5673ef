"""What `clean` drops, that it says so, and that processes change nothing."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from bertkit.cli.clean import clean_command as clean_verb
from bertkit.corpus import writers as documents_out
from bertkit.corpus.build import PrepareOptions, prepare
from bertkit.corpus.clean import (
    EXACT,
    NEAR,
    CleanOptions,
    clean,
    judge_document,
    poor_quality,
    repeated_share,
)
from bertkit.corpus.minhash import shingles
from bertkit.corpus.store import TokenStore
from bertkit.corpus.writers import open_writer
from bertkit.errors import BertkitError
from bertkit.text.documents import TextCounts, find_sources, read_documents
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import make_document
from tests.markdown import ROOT, blocks


def written(*paths: Path) -> list[str]:
    sources = find_sources([str(path) for path in paths])
    return [text for source in sources for text in read_documents(source, TextCounts())]


def changed(document: str, rng: np.random.Generator, words: int) -> str:
    """The document with some words replaced."""
    made = document.split()
    for place in rng.choice(len(made), words, replace=False):
        made[place] = "replaced"
    return " ".join(made)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[str]]:
    """Two files, and the documents that come first: 60 originals, 20 copies, 20 nearly copies."""
    rng = np.random.default_rng(3)
    originals = [make_document(rng, 40) for _ in range(60)]
    copies = [text.upper().replace("\n", "  \n") for text in originals[:20]]
    nearly = [changed(text, rng, 2) for text in originals[20:40]]
    folder = tmp_path_factory.mktemp("corpus")
    files = [folder / "a.txt", folder / "b.jsonl"]
    files[0].write_text("\n\n".join([*originals[:50], *copies]))
    files[1].write_text("".join(json.dumps({"text": t}) + "\n" for t in originals[50:] + nearly))
    return files, originals


def test_exact_copies_are_dropped_and_the_first_stays(
    corpus: tuple[list[Path], list[str]], tmp_path: Path
) -> None:
    files, originals = corpus
    cleaned = clean([str(path) for path in files], tmp_path / "out.jsonl")
    assert cleaned.read.documents == 100
    assert cleaned.kept.documents == 80
    assert cleaned.kept.skipped == {EXACT: 20}
    place = f"{files[0]}, document 51: "
    first = " ".join(originals[0].upper().split())[:50]
    assert cleaned.kept.examples == {EXACT: place + json.dumps(first)}
    found = written(tmp_path / "out.jsonl")
    assert found[:60] == originals
    assert cleaned.kept.bytes == sum(len(text.encode()) for text in found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हमारी भारतीय टीम जीती और भारत में खुशी है", 9),
        ("தமிழ் மொழி மிகவும் பழமையான மொழி", 5),
        (unicodedata.normalize("NFD", "Tiếng Việt có nhiều dấu"), 5),
        ("don't stop", 3),
        ("東京です", 4),
        ("ที่นี่ดี", 3),
        (unicodedata.normalize("NFD", "한국어는 한국"), 17),
        ("ﾄｳｷｮｳ თბილისი", 6),
        ("कि की का के को कू कै कौ कं कः", 10),
    ],
)
def test_marks_belong_to_their_words(text: str, words: int, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    for limit, kept in ((words, 1), (words + 1, 0)):
        if kept:
            options = CleanOptions(min_words=limit, max_words=limit)
            assert clean([str(path)], tmp_path / f"{limit}.jsonl", options).kept.documents == 1
        else:
            with pytest.raises(BertkitError, match=f"fewer than {limit} words"):
                clean([str(path)], tmp_path / f"{limit}.jsonl", CleanOptions(min_words=limit))


def test_the_length_of_words_counts_their_marks(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("हमारी भारतीय टीम जीती और भारत में खुशी है", encoding="utf-8")
    options = CleanOptions(quality=True)
    assert clean([str(path)], tmp_path / "b.jsonl", options).kept.documents == 1
    one, two = shingles("कि की का के को"), shingles("कू कै कौ कं कः")
    assert one.tolist() != two.tolist()


def test_nearly_equal_documents_are_dropped(
    corpus: tuple[list[Path], list[str]], tmp_path: Path
) -> None:
    files, originals = corpus
    paths = [str(path) for path in files]
    cleaned = clean(paths, tmp_path / "out.jsonl", CleanOptions(near=True))
    assert cleaned.kept.skipped[EXACT] == 20
    assert cleaned.kept.skipped[NEAR] >= 18  # of 20, by the formula of `minhash.py`
    assert f"{files[1]}, document " in cleaned.kept.examples[NEAR]
    assert cleaned.kept.documents == 100 - cleaned.kept.skipped.total()
    assert written(tmp_path / "out.jsonl")[:60] == originals
    alone = clean(paths, tmp_path / "near.jsonl", CleanOptions(near=True, exact=False))
    assert set(alone.kept.skipped) == {NEAR}
    assert alone.kept.skipped[NEAR] == cleaned.kept.skipped.total()


def test_any_number_of_processes_writes_the_same(
    corpus: tuple[list[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertkit.corpus.clean.JUDGE_CHARACTERS", 5_000)
    paths = [str(path) for path in corpus[0]]
    options = CleanOptions(near=True, min_words=320)
    one = clean(paths, tmp_path / "1.jsonl.zst", options)
    two = clean(paths, tmp_path / "2.jsonl.zst", options, processes=2)
    assert one == two
    assert len(one.kept.skipped) == 3
    assert (tmp_path / "1.jsonl.zst").read_bytes() == (tmp_path / "2.jsonl.zst").read_bytes()


GOOD = "The river runs below the bridge in winter."


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (GOOD, ""),
        ("10 20 30 -- 40 river 50", "fewer than 80% of words have a letter"),
        (f"{GOOD}\nAnd more.\n{GOOD}\n {GOOD}", "more than 20% of the text is in repeated lines"),
        ("a b c d of to it is in we", "mean word length below 3"),
        ("Donaudampfschifffahrtsgesellschaft Kapitaensmuetze", "mean word length above 10"),
        ("\u6cb3\u6d41\u548c\u77f3\u5934\u3002\u6865\u4e0b\u7684\u6cb3\u3002", ""),
    ],
)
def test_rules_of_quality(document: str, reason: str) -> None:
    assert poor_quality(document, CleanOptions()).startswith(reason)
    assert bool(poor_quality(document, CleanOptions())) == bool(reason)
    assert judge_document(document, CleanOptions()).reason == "", "off unless wanted"
    assert judge_document(document, CleanOptions(quality=True)).reason.startswith(reason)


def test_length_is_counted_in_words() -> None:
    options = CleanOptions(min_words=3, max_words=5)
    reasons = [judge_document(" ".join(["word"] * n), options).reason for n in (2, 3, 5, 6)]
    assert reasons == ["fewer than 3 words", "", "", "more than 5 words"]
    assert judge_document("\u6cb3\u6d41\u548c", options).reason == ""
    assert repeated_share("one\n\n\none\ntwo\n") == pytest.approx(3 / 9)


def test_the_command_counts_every_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(f"{GOOD}\n\n{GOOD}\n\n1 2 3\n\nStone by stone it was built.\n")
    (tmp_path / "b.jsonl").write_text('no JSON\n{"text": "short"}\n')
    out, counts = tmp_path / "out", tmp_path / "counts.json"
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    clean_verb(
        *paths, out=out, processes=1, json=counts, options=CleanOptions(quality=True, min_words=2)
    )
    shown = capsys.readouterr().err
    assert f"{out}: 2 of 5 documents kept, " in shown
    for line in (
        f'dropped: {EXACT}: 1 (first: {tmp_path / "a.txt"}, document 2: "The river runs',
        "dropped: fewer than 80% of words have a letter: 1 (first: ",
        f'dropped: fewer than 2 words: 1 (first: {tmp_path / "b.jsonl"}, document 1: "short")',
        "counted: line is not JSON: 1 (first: ",
    ):
        assert line in shown
    found = json.loads(counts.read_text())
    assert found["read"]["documents"] == 5
    assert found["kept"]["documents"] + sum(found["kept"]["skipped"].values()) == 5
    assert written(out) == [GOOD, "Stone by stone it was built."]


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_files_are_compressed_by_name_and_equal_each_time(tmp_path: Path, ending: str) -> None:
    texts = ["One.\n\u2028Two \U0001f600.", "Three."]
    made = []
    for folder in ("x", "y"):
        out = tmp_path / folder / f"out.jsonl{ending}"
        with open_writer(out) as write:
            assert [write(text) for text in texts] == [len(text.encode()) for text in texts]
        assert written(out) == texts
        made.append(out.read_bytes())
    assert made[0] == made[1]
    if ending == ".zst":  # its checksum notices what still can be decompressed
        out.write_bytes(made[0][:-1] + bytes([made[0][-1] ^ 1]))
        with pytest.raises(BertkitError, match="cannot be read"):
            written(out)
    assert list((tmp_path / "x").iterdir()) == [tmp_path / "x" / f"out.jsonl{ending}"]


def test_a_folder_holds_parts_that_prepare_deals_to_tasks(
    corpus: tuple[list[Path], list[str]],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents_out, "PART_BYTES", 40_000)
    paths = [str(path) for path in corpus[0]]
    clean(paths, tmp_path / "out", CleanOptions())
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(names) > 2
    assert names[:2] == ["part-00000.jsonl.zst", "part-00001.jsonl.zst"]
    store = prepare([str(tmp_path / "out")], tokenizer, tmp_path / "a", PrepareOptions(held_out=0))
    assert store.documents == 80
    with pytest.raises(BertkitError, match="out is there already"):
        clean(paths, tmp_path / "out")


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "b.txt.gz").write_bytes(b"\x1f\x8b torn")
    for name in ("out.jsonl.gz", "out"):
        with pytest.raises(BertkitError, match="cannot be read"):
            clean([str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")], tmp_path / name)
        with pytest.raises(BertkitError, match=r"none of 2 documents is left \(fewer than 9 words"):
            clean([str(tmp_path / "a.txt")], tmp_path / name, CleanOptions(min_words=9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt.gz"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CleanOptions(max_repeated=0.1), "max_repeated has no effect without --quality"),
        (
            CleanOptions(quality=True, min_alphabetic=80),
            "min_alphabetic is a share from 0 to 1, got 80",
        ),
        (CleanOptions(min_words=-1), "must be 0 or more"),
        (CleanOptions(min_words=9, max_words=5), "min_words 9 is above max_words 5"),
        (
            CleanOptions(quality=True, min_word_length=11),
            "min_word_length 11 and max_word_length 10 leave no mean length",
        ),
        (CleanOptions(quality=True, min_word_length=-1), "give 0 <= min_word_length"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, options: CleanOptions, message: str
) -> None:
    (tmp_path / "a.txt").write_text("One.\n")
    with pytest.raises(BertkitError, match=message):
        clean([str(tmp_path / "a.txt")], tmp_path / "out.jsonl", options)


def test_names_of_the_output_are_checked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n")
    for name in ("out.txt", "out.parquet", "out.zst"):
        with pytest.raises(BertkitError, match="not a name for JSON lines"):
            clean([str(tmp_path / "a.txt")], tmp_path / name)
    with pytest.raises(BertkitError, match="is remote"):
        clean([str(tmp_path / "a.txt")], Path("s3://bucket/out.jsonl"))


@pytest.mark.parametrize("name", ["kept.jsonl", "kept"])
def test_what_appears_meanwhile_is_never_written_over(name: str, tmp_path: Path) -> None:
    def meanwhile() -> None:
        with open_writer(tmp_path / name) as write:
            write("first")
            with open_writer(tmp_path / name) as other:
                other("second")

    with pytest.raises(BertkitError, match="is there already"):
        meanwhile()
    [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path.is_relative_to(tmp_path / name)
    assert not list(tmp_path.glob(".*"))


def test_what_is_there_already_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input itself may be named as the output; a leftover of a killed run is no such file."""
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "One."}\n{"text": "One."}\n')
    before = text.read_bytes()
    other = tmp_path / "other.jsonl"
    other.symlink_to("nowhere")
    reasons = {text: "is also an input", other: r"\.jsonl is there already; choose another --out"}
    for out, reason in reasons.items():
        with pytest.raises(BertkitError, match=reason):
            clean([str(text)], out)
    assert text.read_bytes() == before
    assert other.is_symlink()
    other.unlink()
    leftovers = [tmp_path / ".new.jsonl.tmp-1", tmp_path / ".new.jsonl.tmp-1-abcdef01"]
    for leftover in leftovers:
        leftover.write_text("half")
    os.utime(leftovers[0], (1e9, 1e9))
    clean([str(text)], tmp_path / "new.jsonl")
    assert written(tmp_path / "new.jsonl") == ["One."]
    assert [leftover.exists() for leftover in leftovers] == [False, True]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(BertkitError, match="does not end in a name; give the name of a new folder"):
        clean([str(text)], Path())


def test_the_page_runs(
    corpus: tuple[list[Path], list[str]],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer.save(Path("TOKENIZER"))
    Path("CORPUS").symlink_to(corpus[0][0].parent)
    [block] = blocks((ROOT / "docs" / "preparing.md").read_text(), "python")
    exec(compile(block, "docs/preparing.md", "exec"), {})
    assert EXACT in capsys.readouterr().out
    assert TokenStore("STORE").documents > 50
