"""CoNLL-U: what is no word is left out and counted, and words that look alike stay words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.entities import WordsExample, conll_sentences
from bertkit.text.documents import TextCounts

Write = Callable[[str, str], Path]


def row(number: str, word: str, tag: str) -> str:
    return "\t".join([number, word, word, tag, *"______"]) + "\n"


def read(path: Path, word_column: int, tag_column: int) -> tuple[list[WordsExample], TextCounts]:
    counts = TextCounts()
    found = conll_sentences(path, counts, word_column=word_column, tag_column=tag_column)
    return list(found), counts


SENTENCES = (
    row("1", "Vamos", "VERB")
    + row("2-3", "al", "_")
    + row("2", "a", "ADP")
    + row("3", "el", "DET")
    + row("3.1", "nada", "X")
    + "\n# sent_id = 2\n# text = # 1-2\n# a b c d e f g h i\n"
    + row("1", "#", "SYM")
    + row("2", "1-2", "NUM")
)
WORDS = [(("Vamos", "a", "el"), ("VERB", "ADP", "DET")), (("#", "1-2"), ("SYM", "NUM"))]
LEFT_OUT = {"range of words (CoNLL-U), its words kept": 1, "empty node (CoNLL-U)": 1}


def test_comments_ranges_and_empty_nodes(write: Write) -> None:
    head = (
        "# global.columns = ID FORM\n# made by hand\n# newpar\n# sent_id = 1\n# text = Vamos al\n"
    )
    path = write("c.conllu", head + SENTENCES)
    inputs, counts = read(path, 1, 3)
    assert [(i.words, i.tags) for i in inputs] == WORDS
    assert [i.location for i in inputs] == [f"{path}:6", f"{path}:15"]
    assert counts.skipped == LEFT_OUT | {"comment (CoNLL-U)": 8}
    assert counts.examples["empty node (CoNLL-U)"] == f"{path}:10"


@pytest.mark.parametrize(
    "rows", ["1 Mara PROPN\n2 runs VERB\n", "1\tMara\tB-PER\t-\tann\n2\truns\tO\t-\tann\n"]
)
def test_numbers_of_words_are_no_words_in_any_number_of_columns(write: Write, rows: str) -> None:
    """In CoNLL-U Plus, and in the files of Universal NER."""
    path = write("c.conllup", f"# global.columns = ID FORM UPOS\n{rows}\n{rows}")
    with pytest.raises(BertkitError, match="--word-column 1"):
        read(path, 0, 2)
    inputs, _ = read(path, 1, 2)
    assert [given.words for given in inputs] == [("Mara", "runs")] * 2
    words = write("d.conllu", "# text = 1 Mara\n1 NUM\nMara PROPN\n")
    assert [given.words for given in read(words, 0, 1)[0]] == [("1", "Mara")]


def test_without_comments_the_ten_columns_say_what_it_is(write: Write) -> None:
    inputs, counts = read(write("c.conllu", SENTENCES.replace("# a b c d e f g h i\n", "")
                                .replace("# sent_id = 2\n# text = # 1-2\n", "")), 1, 3)  # fmt: skip
    assert [(i.words, i.tags) for i in inputs] == WORDS
    assert counts.skipped == LEFT_OUT


def test_the_column_of_numbers_is_not_that_of_words(write: Write) -> None:
    with pytest.raises(BertkitError, match=r"c\.conllu is CoNLL-U, .* --word-column 1"):
        read(write("c.conllu", SENTENCES), 0, -1)


def test_numbers_of_other_forms_are_words(write: Write) -> None:
    inputs, _ = read(write("t.tsv", "# text = John ran\n1-1\tJohn\tB-X\n1-2\tran\tO\n"), 1, 2)
    assert [i.words for i in inputs] == [("John", "ran")]


def test_newdoc_begins_a_document(write: Write) -> None:
    word = row("1", "a", "X")
    text = f"# newdoc id = 1\n# sent_id = 1\n{word}\n# sent_id = 2\n{word}\n# newdoc\n{word}"
    inputs, _ = read(write("c.conllu", text), 1, 3)
    assert len({i.document for i in inputs[:2]}) == 1 != len({i.document for i in inputs})


def test_lines_of_other_files_are_words(write: Write) -> None:
    """A word #, a score and a version in the column of the words; here no line is a comment."""
    text = "# O\n1-2 O\n1.1 B-X\n\n# B-Y\nx O\n"
    inputs, counts = read(write("t.txt", text), 0, -1)
    assert [i.words for i in inputs] == [("#", "1-2", "1.1"), ("#", "x")]
    assert not counts.skipped
    inputs, counts = read(write("t.txt", f"# id 7 domain=en\n{text}"), 0, -1)
    assert [i.words for i in inputs] == [("#", "1-2", "1.1"), ("#", "x")]
    assert counts.skipped == {"comment (CoNLL-U)": 1}
    inputs, counts = read(write("t.txt", "1.1\ta\tO\n1-2\tb\tO\n"), 1, 2)
    assert [i.words for i in inputs] == [("a", "b")]
    inputs, counts = read(write("t.txt", "#\tNumber=Sing\nx\tO\n"), 0, 1)
    assert inputs[0].tags == ("Number=Sing", "O")
    assert not counts.skipped
