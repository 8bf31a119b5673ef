"""Official sets by name: where their files are, and which of them a request needs."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.own import Files
from bertkit.tasks.own_files import Columns
from bertkit.tasks.sets import READERS, official_paths, read_split
from bertkit.text.lines import TextCounts

Write = Callable[[str, str], Path]
NAMES = Columns()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squad-1.1", r"dev-v1\.1\.json does not exist.*SQuAD-explorer"),
        ("squad-2.0", r"dev-v2\.0\.json does not exist.*SQuAD-explorer"),
        ("swag", r"val\.csv does not exist.*rowanz/swagaf"),
        ("conll-2003", r"valid\.txt does not exist.*uantwerpen.*Reuters.*NIST"),
    ],
)
def test_absent_data_names_the_place(tmp_path: Path, name: str, message: str) -> None:
    assert set(READERS) >= {name}
    with pytest.raises(BertkitError, match=message):
        read_split(name, "dev", Files(data=tmp_path), NAMES, TextCounts())


def test_a_split_needs_its_own_file_only(write: Write) -> None:
    path = str(write("mine.txt", "a O\nb B-X\n"))
    for split in ("train", "dev", "test"):
        files = Files(**{split: path})  # type: ignore[arg-type]
        assert len(read_split("conll-2003", split, files, NAMES, TextCounts())) == 1
        other = "dev" if split == "train" else "train"
        with pytest.raises(BertkitError, match=f"give --data FOLDER, or --{other} FILE"):
            read_split("conll-2003", other, files, NAMES, TextCounts())
    with pytest.raises(BertkitError, match=r"squad-1\.1 has no official test file; .* --test FILE"):
        read_split("squad-1.1", "test", Files(data=Path()), NAMES, TextCounts())


def test_files_and_columns_that_an_official_set_has_no_use_for_are_refused(write: Write) -> None:
    own = str(write("mine.tsv", "a\n"))
    with pytest.raises(BertkitError, match="mrpc is read from --data FOLDER"):
        read_split("mrpc", "dev", Files(data=Path(), dev=own), NAMES, TextCounts())
    with pytest.raises(BertkitError, match="conll-2003 knows its columns"):
        read_split("conll-2003", "dev", Files(dev=own), Columns(tag_column=1), TextCounts())


@pytest.mark.parametrize("name", ["classify", "squad-1.1"])
def test_misspelt_splits(name: str) -> None:
    with pytest.raises(BertkitError, match="no split 'tset'; did you mean 'test'"):
        read_split(name, "tset", Files(), NAMES, TextCounts())


def test_files_in_a_folder_and_overruled(tmp_path: Path) -> None:
    for name in ("eng.train", "dev.txt", "valid.txt"):
        (tmp_path / name).write_text("a O\n")
    assert official_paths("conll-2003", Files(data=tmp_path)) == {
        "train": str(tmp_path / "eng.train"),
        "dev": str(tmp_path / "dev.txt"),
    }
    url = "https://host/eng.testb.gz"
    assert official_paths("conll-2003", Files(data=tmp_path, test=url))["test"] == url


def test_an_official_file_may_be_compressed_and_remote(tmp_path: Path) -> None:
    path = tmp_path / "eng.testa.gz"
    path.write_bytes(gzip.compress(b"a O\n\nb O\n"))
    for place in (str(path), path.as_uri()):
        found = read_split("conll-2003", "dev", Files(dev=place), NAMES, TextCounts())
        assert [given.words for given in found] == [("a",), ("b",)]
