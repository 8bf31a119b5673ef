"""A BabyLM-style run: at most 10 million words, at most 10 epochs, at most 6 hours on two cores.

The text is the first 7 million words of one part of English Wikipedia, in whole documents, and the
3 million words of BabyLM's training sample: spoken English, talk with children, books, subtitles
and Simple Wikipedia. Words are what white space separates. The recipe is `overnight` with six
tenths of its updates. The model is evaluated on all of BLiMP at the end; BLiMP decided about no
setting.

    python -m benchmarks.babylm --data FOLDER --work FOLDER

A stopped run is resumed by the same command, so its hours may be those of several days; they are
counted as seconds of updates. The results file is written when the run has finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertkit.corpus.from_text import TextOptions, store_from_text
from bertkit.predict.minimal_pairs import evaluate_minimal_pairs

from benchmarks.record import data_folder, new_parser, write_result
from benchmarks.run_summary import minutes, summarize
from benchmarks.speedrun import finish_run
from bertkit.files import read_json, write_json, write_text
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.sentences import split_sentences
from bertkit.text.sources import find_sources
from bertkit.training.recipe import read_recipe

WIKIPEDIA_WORDS, MOST_WORDS, MOST_EPOCHS, MOST_HOURS = 7_000_000, 10_000_000, 10, 6
PARTS = ("bnc_spoken", "childes", "gutenberg", "open_subtitles", "simple_wiki")
RECIPE = "overnight"
STEPS = (2_400, 6_900, 900)
"""The updates of the recipe's three phases here."""
VOCABULARY = 8_000
DOCUMENT_SENTENCES = 40
"""The sentences of a document, where the source does not say where one ends."""
HEADING = re.compile(r"= = = [^=]+ = = =")
SPEAKER = re.compile(r"(?:^|\s)\*[A-Z]{3}:\s")


def babylm_documents(path: Path) -> Iterator[str]:
    """Yield the documents of one part of BabyLM's sample, with a sentence on each line."""
    for piece in HEADING.split(path.read_text(encoding="utf-8")):
        lines = [line for turn in SPEAKER.split(piece) for line in split_sentences(turn)]
        for first in range(0, len(lines), DOCUMENT_SENTENCES):
            yield "\n".join(lines[first : first + DOCUMENT_SENTENCES])


def wikipedia_documents(path: Path) -> Iterator[str]:
    """Yield the first documents of a part of Wikipedia, up to `WIKIPEDIA_WORDS` words."""
    words = 0
    [source] = find_sources([str(path)])
    for document in read_documents(source, TextCounts()):
        words += len(document.split())
        if words > WIKIPEDIA_WORDS:
            return
        yield "\n".join(line for line in document.splitlines() if line.strip())


def make_corpus(data: Path, folder: Path) -> dict[str, int]:
    """Write the text, unless it is there, and return the number of words of each part."""
    if (folder / "words.json").is_file():
        return dict(read_json(folder / "words.json"))
    parts = {"wikipedia": list(wikipedia_documents(data / "wikipedia" / "wiki_AA.txt.xz"))}
    for name in PARTS:
        parts[name] = list(babylm_documents(data / "babylm" / f"{name}.train"))
    words = {name: sum(len(one.split()) for one in found) for name, found in parts.items()}
    assert sum(words.values()) <= MOST_WORDS, words
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in parts.items():
        write_text(folder / f"{name}.txt", "\n\n".join(documents) + "\n")
    write_json(folder / "words.json", words)
    return words


def main() -> None:
    """Make or finish the run, evaluate it, and write results/babylm.json."""
    parser = new_parser(__doc__, work="runs/babylm")
    arguments = parser.parse_args()
    data, work = data_folder(arguments.data), arguments.work
    words = make_corpus(data, work / "text")
    texts = tuple(str(work / "text" / f"{name}.txt") for name in words)
    options = TextOptions(text=texts, vocabulary_size=VOCABULARY, format="text")
    store = store_from_text(options, work / "corpus")
    recipe, out = read_recipe(RECIPE), work / "run"
    recipe = replace(recipe, phases=replace(recipe.phases, steps=STEPS))
    finish_run(recipe, store, out, RECIPE)
    found = summarize(out)
    epochs = found["run"]["training_tokens"] / store.tokens
    hours = minutes(found["curve"], found["curve"][-1]["step"]) / 60
    assert epochs <= MOST_EPOCHS, epochs
    assert hours <= MOST_HOURS, hours
    blimp = evaluate_minimal_pairs(out, data / "blimp", device="cpu")
    [*_, last] = found["table"].values()
    row: dict[str, Any] = {
        "parameters": found["run"]["parameters"],
        "words": sum(words.values()),
        "epochs": round(epochs, 2),
        "hours": round(hours, 2),
        "mlm_loss": last["mlm_loss"],
        "blimp_accuracy": round(blimp.accuracy, 4),
        **{f"{name}_accuracy": round(one, 4) for name, one in blimp.fields.items()},
    }
    details = {
        "words_by_part": words,
        "sets": {name: round(one.accuracy, 4) for name, one in blimp.sets.items()},
        **{key: found[key] for key in ("run", "curve", "evaluations")},
    }
    print(write_result("babylm", {RECIPE: row}, details))


if __name__ == "__main__":
    main()
