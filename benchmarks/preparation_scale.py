"""Preparing a corpus and one ten times as large: is peak memory flat, and is time linear?

The larger corpus is the Wikipedia parts over and over, each time with other words changed (one in
fifty, by a seeded generator), so that no two documents are equal. Each size is prepared, and then
cleaned of nearly equal documents, in a new process each. Peak memory is the largest sum, seen every
tenth of a second, of what a process and its workers held.

    python -m benchmarks.preparation_scale --data FOLDER
    python -m benchmarks.preparation_scale --data FOLDER --quick  # an excerpt, no result file
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prepare import PARTS, watched
from benchmarks.record import child_result, data_folder, new_parser, summary, write_result

CHANGED = 0.02
"""The share of words that are replaced in each repetition."""
SIZES = (1, 10)
WORKS = ("prepare", "clean, near-duplicates")
QUICK_DOCUMENTS = 60


def main() -> None:
    """Make the corpora, then measure every work on every size."""
    if sys.argv[1:2] == ["--child"]:
        work(*sys.argv[2:])
        return
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    data = data_folder(arguments.data)
    documents = QUICK_DOCUMENTS if arguments.quick else None
    with tempfile.TemporaryDirectory() as folder:
        corpora = make_corpora(data, Path(folder), documents)
        rows = measure_all(corpora, data, Path(folder), arguments.processes, arguments.repeats)
    print(json.dumps(rows, indent=1))
    if not arguments.quick:
        print(write_result("preparation_scale", rows, {"changed_words": CHANGED}))


def make_corpora(data: Path, folder: Path, documents: int | None) -> dict[int, Path]:
    """Write a folder of text for each size, with a file for each Wikipedia part and repetition."""
    corpora = {}
    for size in SIZES:
        corpora[size] = folder / f"corpus-{size}"
        corpora[size].mkdir()
        for repetition in range(size):
            for number, part in enumerate(PARTS):
                name = corpora[size] / f"{repetition:02d}-{number}.txt.xz"
                with lzma.open(name, "wt", encoding="utf-8", preset=0) as out:
                    texts = islice(blocks(data / "wikipedia" / part), documents)
                    rng = np.random.default_rng([repetition, number])
                    for text in texts:
                        out.write((changed(text, rng) if repetition else text) + "\n\n")
    return corpora


def blocks(path: Path) -> Iterator[str]:
    """Yield the documents of a Wikipedia part."""
    from bertkit.text.documents import TextCounts, find_sources, read_documents

    [source] = find_sources([str(path)])
    yield from read_documents(source, TextCounts())


def changed(text: str, rng: np.random.Generator) -> str:
    """Replace one word in fifty of a document by another of its words; line ends stay."""
    words = text.split(" ")
    count = int(rng.binomial(len(words), CHANGED)) + 1
    for place, source in rng.integers(0, len(words), (count, 2)):
        if "\n" not in words[place] + words[source]:
            words[place] = words[source]
    return " ".join(words)


def measure_all(
    corpora: dict[int, Path], data: Path, folder: Path, processes: int, repeats: int
) -> dict[str, Any]:
    """Return a row for each work and size; that of the large size also says how the work grows."""
    vocabulary = data / "vocab" / "bert-base-uncased-vocab.txt"
    rows: dict[str, Any] = {}
    for name in WORKS:
        for size, corpus in corpora.items():
            found = [
                child(name, corpus, vocabulary, folder / f"out-{size}-{name[-5:]}", processes)
                for _ in range(repeats)
            ]
            rows[f"{name}, x{size}"] = {
                "processes": processes,
                "repeats": repeats,
                "text_megabytes": round(found[0]["bytes"] / 1e6, 1),
                "documents": found[0]["documents"],
                "seconds": summary([run["seconds"] for run in found]),
                "megabytes_per_second": summary([r["bytes"] / 1e6 / r["seconds"] for r in found]),
                "peak_megabytes_of_all_processes": summary([r["peak_megabytes"] for r in found]),
                **({"kept": found[0]["kept"]} if "kept" in found[0] else {}),
            }
            print(f"{name}, x{size}", rows[f"{name}, x{size}"], flush=True)
        small, large = (rows[f"{name}, x{size}"] for size in SIZES)
        peak = "peak_megabytes_of_all_processes"
        times = large["seconds"]["median"] / small["seconds"]["median"]
        large["times_the_seconds"] = round(times, 2)
        large["times_the_peak"] = round(large[peak]["median"] / small[peak]["median"], 2)
    return rows


def child(name: str, corpus: Path, vocabulary: Path, out: Path, processes: int) -> dict[str, Any]:
    """Make one measurement in a process of its own, and remove what it made."""
    found = child_result(name, corpus, vocabulary, out, processes)
    shutil.rmtree(out)
    return found


def work(name: str, corpus: str, vocabulary: str, out: str, processes: str) -> None:
    """Do the work of a child process, then print what it took as one JSON line."""
    with watched() as taken:
        done = WORK[name](corpus, vocabulary, Path(out), int(processes))
    print(json.dumps({**taken, **done}))


def prepare_text(corpus: str, vocabulary: str, out: Path, processes: int) -> dict[str, Any]:
    """Make the token store."""
    from bertkit.corpus.build import prepare
    from bertkit.tokenizer.wordpiece import Tokenizer

    store = prepare([corpus], Tokenizer.load(vocabulary), out, processes=processes)
    text = store.manifest["text"]
    return {"bytes": text["bytes"], "documents": text["documents"]}


def clean_near(corpus: str, vocabulary: str, out: Path, processes: int) -> dict[str, Any]:
    """Drop documents equal or nearly equal to earlier ones, as most of the repetitions are."""
    from bertkit.corpus.clean import CleanOptions, clean

    cleaned = clean([corpus], out, CleanOptions(near=True, quality=True), processes=processes)
    return {
        "bytes": cleaned.read.bytes,
        "documents": cleaned.read.documents,
        "kept": cleaned.kept.documents,
        "key_megabytes": round(cleaned.key_bytes / 1e6, 2),
    }


WORK = dict(zip(WORKS, (prepare_text, clean_near), strict=True))


if __name__ == "__main__":
    main()
