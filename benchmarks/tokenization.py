"""Tokenizer.encode_batch against the bare `tokenizers` pipeline on Wikipedia, one thread.

Both give the ids without [CLS] and [SEP]. The bare pipeline is BertNormalizer, BertPreTokenizer and
WordPiece through `encode_batch_fast`, its quickest call. Repeats alternate between the two; each
bertkit repeat starts with a fresh tokenizer, so that no remembered word is carried over.

    python -m benchmarks.tokenization --data FOLDER
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before tokenizers is imported

from benchmarks.record import data_folder, summary, write_result
from bertkit.tokenizer.wordpiece import Tokenizer

SENTENCE_END = re.compile(r"(?<=[.!?]) ")


def read_sentences(path: Path, megabytes: float) -> list[str]:
    """About that many megabytes of sentences, cut roughly; document marks are left out."""
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
    """The library's pipeline alone, with the same vocabulary and limits."""
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    ids = {piece: index for index, piece in enumerate(tokenizer.vocabulary)}
    limit = tokenizer.max_word_characters
    pipeline = Pipeline(WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=limit))
    pipeline.normalizer = BertNormalizer(lowercase=tokenizer.lowercase)
    pipeline.pre_tokenizer = BertPreTokenizer()
    return pipeline


def seconds(
    encode: Callable[[list[str]], list[list[int]]], sentences: list[str]
) -> tuple[float, list[list[int]]]:
    """The wall-clock time of one pass, and the ids."""
    start = time.perf_counter()
    found = encode(sentences)
    return time.perf_counter() - start, found


def compare(vocabulary: Path, sentences: list[str], repeats: int) -> dict[str, Any]:
    """Rates of both in MB/s of UTF-8 (median, lowest, highest) and bertkit's multiple of bare."""
    megabytes = sum(len(sentence.encode()) for sentence in sentences) / 1e6
    pipeline = bare_pipeline(Tokenizer.load(vocabulary))

    def encode_bare(texts: list[str]) -> list[list[int]]:
        found = pipeline.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    rates: dict[str, list[float]] = {"bare": [], "bertkit": []}
    equal = 0
    for _ in range(repeats):
        bare_time, bare_ids = seconds(encode_bare, sentences)
        own_time, own_ids = seconds(Tokenizer.load(vocabulary).encode_batch, sentences)
        rates["bare"].append(megabytes / bare_time)
        rates["bertkit"].append(megabytes / own_time)
        equal = sum(own == bare for own, bare in zip(own_ids, bare_ids, strict=True))
    multiples = [own / bare for own, bare in zip(rates["bertkit"], rates["bare"], strict=True)]
    return {
        "sentences": len(sentences),
        "megabytes": round(megabytes, 2),
        "repeats": repeats,
        "tokens": sum(map(len, own_ids)),
        "sentences_equal_to_bare": equal,
        **{f"{name}_megabytes_per_second": summary(values) for name, values in rates.items()},
        "bertkit_over_bare": summary(multiples),
    }


def main() -> None:
    """Measure both vocabularies, print the rates, write results/tokenization.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    data = data_folder(arguments.data)
    wikipedia = data / "wikipedia" / "wiki_AA.txt.xz"
    sentences = read_sentences(wikipedia, arguments.megabytes)
    rows = {}
    for name in ("bert-base-uncased", "bert-base-cased"):
        vocabulary = data / "vocab" / f"{name}-vocab.txt"
        rows[name] = row = compare(vocabulary, sentences, arguments.repeats)
        print(
            f"{name}: bare {row['bare_megabytes_per_second']['median']} MB/s,"
            f" bertkit {row['bertkit_megabytes_per_second']['median']} MB/s,"
            f" {row['bertkit_over_bare']['median']} times"
            f" ({row['sentences_equal_to_bare']} of {row['sentences']} sentences equal)"
        )
    print(write_result("tokenization", rows))


if __name__ == "__main__":
    main()
