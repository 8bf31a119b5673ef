"""Speed of `load_embedder` beside sentence-transformers: the same weights and texts in one run.

The weights are genuine ones that sentence-transformers tuned (a package of the dev extra). The
texts are all different sentences of STS-B's dev set; they are timed from raw text to vectors, so
tokenizing counts. The batch size of sentence-transformers is the fastest of several, tried once
before. Rounds go through all contestants in turn; ratios are between runs of one round. Vectors are
compared with those of sentence-transformers in fp32, and the lowest cosine is kept.

    python -m benchmarks.embeddings --data FOLDER
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.exports import fast_modes, processor_name, silence
from benchmarks.record import (
    data_folder,
    installed,
    new_parser,
    start_model,
    summary,
    timed,
    write_result,
)
from bertkit import load_embedder

REFERENCE = "sentence-transformers fp32"
BATCHES = (16, 32, 64, 128)
"""The batch sizes to try for sentence-transformers, whose default is 32."""

Contestant = Callable[[Sequence[str]], np.ndarray]
"""Maps texts to unit vectors, (texts, width)."""


def sentences(data: Path) -> list[str]:
    """Return the different sentences of STS-B's dev set, in its order."""
    lines = (data / "glue" / "STS-B" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]
    both = [text for line in lines for text in line.split("\t")[-3:-1]]
    return list(dict.fromkeys(both))


def reference(model: Path, texts: Sequence[str]) -> tuple[Contestant, int]:
    """Return sentence-transformers in fp32, and its batch size that was fastest on one pass."""
    from transformers.utils import logging as their_logging

    their_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with silence():
        from sentence_transformers import SentenceTransformer

        theirs = SentenceTransformer(str(model), device="cpu", local_files_only=True)

    def with_batch(size: int) -> Contestant:
        return lambda many: theirs.encode(list(many), batch_size=size, show_progress_bar=False)

    with_batch(BATCHES[0])(texts[::8])
    seconds = {size: timed(with_batch(size), texts)[1] for size in BATCHES}
    best = min(BATCHES, key=seconds.__getitem__)
    return with_batch(best), best


def measure(
    contestants: Mapping[str, Contestant], texts: Sequence[str], repeats: int
) -> dict[str, dict[str, Any]]:
    """Time all contestants in turn, after a warm-up on some texts, and return their rows."""
    for contestant in contestants.values():
        contestant(texts[::8])
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    vectors: dict[str, np.ndarray] = {}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            vectors[name], taken = timed(contestant, texts)
            seconds[name].append(taken)
            print(name, f"{taken:.2f} s", flush=True)
    return {
        name: {
            "runs": repeats,
            "texts": len(texts),
            "texts_per_second": summary([len(texts) / taken for taken in seconds[name]]),
            "over_sentence_transformers": summary(
                [base / ours for base, ours in zip(seconds[REFERENCE], seconds[name], strict=True)]
            ),
            "lowest_cosine": round(float((vectors[name] * vectors[REFERENCE]).sum(1).min()), 6),
        }
        for name in contestants
    }


def main() -> None:
    """Measure, and write the results file."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model, texts = start_model(), sentences(data_folder(options.data))
    theirs, batch = reference(model, texts)
    contestants = {REFERENCE: theirs}
    for mode in fast_modes():
        contestants[f"bertkit {mode}"] = load_embedder(model, precision=mode, device="cpu").encode
    rows = measure(contestants, texts, options.repeats)
    details = {
        "repeats": options.repeats,
        "batch_of_sentence_transformers": batch,
        "sentence_transformers": installed("sentence-transformers"),
    }
    print(write_result(processor_name("embeddings"), rows, details, options.out))


if __name__ == "__main__":
    main()
