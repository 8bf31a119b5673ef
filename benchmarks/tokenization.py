"""bertkit's tokenizer against `tokenizers` and nanotoken on Wikipedia, by CPU time of one thread.

All return the ids without [CLS] and [SEP] of whole lists of sentences: bertkit as lists of Python
integers (`encode_batch`) and as arrays (`encode_arrays`, as `prepare` calls it), `tokenizers`
through its quickest call, and nanotoken through its own (`pip install -e '.[peers]'`), as arrays
without offsets. A "cold" pass uses a new tokenizer; the "warm" pass follows it on as much other
text, so that words known from the first are remembered. Repeats go through all of them in turn.

    python -m benchmarks.tokenization --data FOLDER
"""

from __future__ import annotations

import gc
import lzma
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before tokenizers is imported

from benchmarks.record import data_folder, installed, new_parser, summary, write_result
from bertkit import Tokenizer

Encode = Callable[[Sequence[str]], Any]

SENTENCE_END = re.compile(r"(?<=[.!?]) ")
WORD_LIMIT = 100
"""The length in characters of the longest word that WordPiece splits."""


def read_sentences(path: Path, megabytes: float) -> list[str]:
    """Read about so many megabytes of sentences, cut roughly; document marks are left out."""
    sentences: list[str] = []
    left = megabytes * 1e6
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.strip() and not line.startswith(("<doc", "</doc")):
                sentences += SENTENCE_END.split(line.strip())
                left -= len(line.encode())
            if left <= 0:
                break
    return sentences


def bare_pipeline(tokenizer: Tokenizer) -> Any:
    """Return the pipeline of `tokenizers` alone, with the same vocabulary and limits."""
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    ids = {piece: index for index, piece in enumerate(tokenizer.vocabulary)}
    model = WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=WORD_LIMIT)
    pipeline = Pipeline(model)
    pipeline.normalizer = BertNormalizer(lowercase=tokenizer.lowercase)
    pipeline.pre_tokenizer = BertPreTokenizer()
    return pipeline


def encoders(vocabulary: Path) -> dict[str, Encode]:
    """Make new tokenizers of each library, and return the functions that encode texts with them."""
    tokenizer, arrays = Tokenizer.load(vocabulary), Tokenizer.load(vocabulary)
    pipeline = bare_pipeline(tokenizer)
    encode: dict[str, Encode] = {
        "bertkit, arrays": arrays.encode_arrays,
        "bertkit, lists": tokenizer.encode_batch,
        "tokenizers": lambda texts: [
            encoding.ids for encoding in pipeline.encode_batch_fast(texts, add_special_tokens=False)
        ],
    }
    if installed("nanotoken"):
        import nanotoken

        peer = nanotoken.Tokenizer.from_vocab(str(vocabulary), lowercase=tokenizer.lowercase)
        encode["nanotoken"] = lambda texts: peer.encode_batch(
            texts, add_special_tokens=False, parallel=False
        )
    return encode


def as_lists(encoded: Any) -> list[list[int]]:
    """Return what an encoder returned as a list of ids for each text."""
    if isinstance(encoded, tuple):
        ids, lengths = encoded
        ends = lengths.cumsum()
        return [ids[end - n : end].tolist() for end, n in zip(ends, lengths, strict=True)]
    return [list(map(int, ids)) for ids in encoded]


def compare(vocabulary: Path, sentences: list[str], repeats: int) -> dict[str, dict[str, Any]]:
    """Return library -> MB of UTF-8 per CPU second, cold and warm, and equal sentences."""
    half = len(sentences) // 2
    parts = {"cold": sentences[:half], "warm": sentences[half:]}
    sizes = {name: sum(len(text.encode()) for text in part) / 1e6 for name, part in parts.items()}
    rates: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        for library, encode in encoders(vocabulary).items():
            for name, part in parts.items():
                rate = sizes[name] / processor_seconds(encode, part)
                rates.setdefault(library, {}).setdefault(name, []).append(rate)
    ids = {library: as_lists(encode(sentences)) for library, encode in encoders(vocabulary).items()}
    base = rates["tokenizers"]["cold"]
    return {
        library: {
            **{f"{name}_megabytes_per_cpu_second": summary(rate[name]) for name in parts},
            "cold_over_tokenizers": summary(
                [a / b for a, b in zip(rate["cold"], base, strict=True)]
            ),
            "sentences_as_tokenizers": sum(map(list.__eq__, ids[library], ids["tokenizers"])),
        }
        for library, rate in rates.items()
    }


def processor_seconds(encode: Encode, texts: list[str]) -> float:
    """Measure the processor time of encoding, without what Python's garbage collector adds."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        returned = encode(texts)
        seconds = time.process_time() - start
        del returned
    finally:
        gc.enable()
    return seconds


def main() -> None:
    """Measure both vocabularies, print the rates, and write results/tokenization.json."""
    parser = new_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    data = data_folder(options.data)
    sentences = read_sentences(data / "wikipedia" / "wiki_AA.txt.xz", options.megabytes)
    rows = []
    for name in ("bert-base-uncased", "bert-base-cased"):
        vocabulary = data / "vocab" / f"{name}-vocab.txt"
        for library, row in compare(vocabulary, sentences, options.repeats).items():
            rows.append({"vocabulary": name, "library": library, **row})
            print(rows[-1])
    details = {"sentences": len(sentences), "repeats": options.repeats}
    peers = {"nanotoken": installed("nanotoken")}
    print(write_result("tokenization", rows, {**details, "peers": peers}, options.out))


if __name__ == "__main__":
    main()
