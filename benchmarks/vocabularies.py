"""Vocabularies learned by frequency and by likelihood: cost, fit, and what a model makes of them.

    python -m benchmarks.vocabularies --data FOLDER [--pretrain] [--quick]

Each vocabulary is learned from wiki_AA in a process of its own, on one core. The cost is the
seconds of counting words and of joining pairs, and the peak memory of the process. The fit (pieces
a word, [UNK], characters a piece) is measured on documents of wiki_AB, from which nothing was
learned.

With --pretrain the same small model is trained on the same documents with each vocabulary, and
scored on the same held-out documents. Loss per piece cannot be compared: the pieces differ. So the
scores are *bits per character*: the masked-language loss summed over all hidden pieces, divided by
ln 2 and by the number of characters of these pieces ("##" is none; [UNK] counts as one). It is
taken twice: with 15 % of the pieces hidden, and with whole words hidden. The second is the fairer
one, as what is hidden depends less on how words are cut. Neither is a rate of compression.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.record import data_folder, new_parser, timed, write_result
from bertkit.tokenizer.count import count_words
from bertkit.tokenizer.train import CRITERIA, learn_from_counts, measure_vocabulary
from bertkit.tokenizer.wordpiece import Tokenizer

LENGTH, BATCH, PREDICTIONS, WARMUP_SHARE = 64, 64, 10, 0.1


def articles(data: Path, part: str, megabytes: float | None) -> Iterator[str]:
    """Yield the documents of a part of Wikipedia, as many as hold so many megabytes."""
    from bertkit.text.documents import TextCounts, find_sources, read_documents

    [source] = find_sources([str(data / "wikipedia" / f"{part}.txt.xz")])
    counts = TextCounts()
    for document in read_documents(source, counts):
        yield document
        if megabytes is not None and counts.bytes >= 1e6 * megabytes:
            return


def peak_megabytes() -> float:
    """Return the peak memory of this process, without that of the process that started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def learn_one(
    data: Path, criterion: str, size: int, megabytes: float | None
) -> tuple[list[str], dict[str, Any]]:
    """Learn one vocabulary in a fresh process; return it and what it took."""
    counts, counting = timed(
        lambda: count_words(articles(data, "wiki_AA", megabytes), lowercase=True)
    )
    after_counting = peak_megabytes()
    pieces, joining = timed(lambda: learn_from_counts(counts, size, criterion=criterion))
    return pieces, {
        "pieces": len(pieces),
        "words": counts.total(),
        "distinct_words": len(counts),
        "reading_and_counting_seconds": round(counting, 2),
        "joining_seconds": round(joining, 2),
        "peak_megabytes": round(peak_megabytes(), 1),
        "peak_megabytes_after_counting": round(after_counting, 1),
    }


def in_fresh_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a process that has done nothing else."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def fit(tokenizer: Tokenizer, data: Path, documents: int) -> dict[str, Any]:
    """Measure how a vocabulary fits the first documents of wiki_AB."""
    report = measure_vocabulary(tokenizer, islice(articles(data, "wiki_AB", None), documents))
    return {
        "held_out_documents": documents,
        "held_out_words": report.words,
        "fertility": round(report.fertility, 4),
        "unknown_share": round(report.unknown_share, 6),
        "characters_per_piece": round(report.characters_per_token, 4),
        "pieces_never_used": len(report.unused_tokens),
    }


def piece_lengths(tokenizer: Tokenizer) -> list[int]:
    """Return the characters of each piece; [UNK], whose characters are not known, counts as one."""
    lengths = [len(piece.removeprefix("##")) for piece in tokenizer.vocabulary]
    lengths[tokenizer.unk_id] = 1
    return lengths


def train(tokenizer: Tokenizer, text: Path, work: Path, updates: int) -> dict[str, Any]:
    """Pre-train the small model with a vocabulary, and score it; a finished run is not repeated."""
    from bertkit.corpus.build import PrepareOptions, prepare
    from bertkit.training.journal import read_journal
    from bertkit.training.pretrain import pretrain
    from bertkit.training.recipe import ModelSize, Phases, PretrainRecipe, Training

    store = prepare([str(text)], tokenizer, work / "store", PrepareOptions(held_out=0.05))
    recipe = PretrainRecipe(
        model=ModelSize(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            dropout=0.0,
        ),
        phases=Phases(
            lengths=(LENGTH,),
            steps=(updates,),
            batch_sizes=(BATCH,),
            max_predictions=(PREDICTIONS,),
        ),
        training=Training(learning_rate=2e-3, warmup_steps=max(1, int(WARMUP_SHARE * updates))),
    )
    _, seconds = timed(lambda: pretrain(recipe, store, work / "run", device="cpu"))
    start = [r for r in read_journal(work / "run" / "journal.jsonl") if r["kind"] == "start"][-1]
    lengths = piece_lengths(tokenizer)
    characters = sum(n * size for n, size in zip(store.unigrams.tolist(), lengths, strict=True))
    seen = updates * BATCH * (start["pairs"]["mean_tokens"] - 3) * characters / store.tokens
    return {
        "updates": updates,
        "training_seconds": round(seconds, 1),
        "million_characters_trained_on": round(seen / 1e6, 2),
        "hidden_pieces": score(work / "run" / "model", store, recipe, lengths, whole_words=False),
        "hidden_words": score(work / "run" / "model", store, recipe, lengths, whole_words=True),
    }


def score(
    model: Path, store: Any, recipe: Any, lengths: list[int], *, whole_words: bool
) -> dict[str, Any]:
    """Measure bits per character and per piece of what is hidden in the held-out documents."""
    import torch
    import torch.nn.functional as F

    from bertkit.checkpoints.pretrained import load_pretraining_model
    from bertkit.corpus.store import TokenStore
    from bertkit.pretraining_data.masking import MaskingOptions
    from bertkit.training.data import HELD_OUT_BATCH, phase_examples

    network, sizes = load_pretraining_model(model), torch.tensor(lengths)
    held_out, masking = (
        TokenStore(store.folder, "held_out"),
        MaskingOptions(whole_words=whole_words),
    )
    table, builder = phase_examples(recipe, held_out, 0, masking, seed=0)
    rows = table.first(recipe.logging.held_out_sequences)
    nats, characters, pieces = 0.0, 0, 0
    with torch.inference_mode():
        for first in range(0, len(rows), HELD_OUT_BATCH):
            batch = builder[rows[first : first + HELD_OUT_BATCH]]
            logits = network(batch.packed, batch.target_positions).mlm_logits
            nats += float(F.cross_entropy(logits, batch.target_ids, reduction="sum"))
            characters += int(sizes[batch.target_ids].sum())
            pieces += len(batch.target_ids)
    return {
        "bits_per_character": round(nats / math.log(2) / characters, 4),
        "bits_per_piece": round(nats / math.log(2) / pieces, 4),
        "characters_per_piece": round(characters / pieces, 4),
        "pieces": pieces,
        "sequences": len(rows),
    }


def train_all(
    tokenizers: dict[str, Tokenizer], data: Path, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Train with each vocabulary in turn, all on the same documents, and return the scores."""
    from bertkit.files import write_text

    name = (
        f"{arguments.size}-{arguments.pretrain_megabytes:g}-{arguments.updates}-{arguments.match}"
    )
    work = arguments.work / f"{name}-{arguments.megabytes or 'all'}"
    text = work / "text.txt"
    if not text.is_file():
        documents = articles(data, "wiki_AA", arguments.pretrain_megabytes)
        one_block = ("\n".join(filter(str.strip, d.splitlines())) for d in documents)
        write_text(text, "\n\n".join(one_block))
    updates = dict.fromkeys(tokenizers, arguments.updates)
    if arguments.match == "characters":
        sample = list(articles(data, "wiki_AA", min(5.0, arguments.pretrain_megabytes)))
        sizes = {
            name: measure_vocabulary(tokenizer, sample).characters_per_token
            for name, tokenizer in tokenizers.items()
        }
        least = min(sizes.values())
        updates = {name: round(arguments.updates * least / size) for name, size in sizes.items()}
    return {
        name: train(tokenizer, text, work / name, updates[name])
        for name, tokenizer in tokenizers.items()
    }


def parse() -> argparse.Namespace:
    """Parse the options; --quick shows the whole thing at work in about a minute."""
    parser = new_parser(__doc__)
    parser.add_argument("--size", type=int, default=16_000)
    parser.add_argument("--megabytes", type=float, help="of wiki_AA to learn from; all of it")
    parser.add_argument("--documents", type=int, default=1_000, help="of wiki_AB to measure on")
    parser.add_argument("--pretrain", action="store_true")
    parser.add_argument("--pretrain-megabytes", type=float, default=30.0)
    parser.add_argument("--updates", type=int, default=2_000)
    parser.add_argument("--match", choices=("updates", "characters"), default="updates")
    parser.add_argument("--work", type=Path, default=Path("runs/vocabularies"))
    parser.add_argument("--quick", action="store_true", help="tiny; writes no results file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.megabytes, arguments.documents = 2_000, 2.0, 50
        arguments.pretrain_megabytes, arguments.updates = 1.0, 20
    return arguments


def main() -> None:
    """Learn, measure, train if asked to, and write the results file."""
    arguments = parse()
    data = data_folder(arguments.data)
    rows: dict[str, dict[str, Any]] = {}
    tokenizers: dict[str, Tokenizer] = {}
    for criterion in CRITERIA:
        pieces, row = in_fresh_process(
            learn_one, data, criterion, arguments.size, arguments.megabytes
        )
        tokenizers[criterion] = Tokenizer.from_vocabulary(pieces, lowercase=True)
        rows[criterion] = row | fit(tokenizers[criterion], data, arguments.documents)
        print(criterion, rows[criterion], flush=True)
    if arguments.pretrain:
        for criterion, scores in train_all(tokenizers, data, arguments).items():
            rows[criterion] |= scores
            print(criterion, scores, flush=True)
    shared = len(set.intersection(*(set(t.vocabulary) for t in tokenizers.values())))
    settings = {
        name: getattr(arguments, name)
        for name in ("size", "megabytes", "pretrain_megabytes", "updates", "match")
    }
    details = {"settings": settings, "shared_pieces": shared}
    if not arguments.quick:
        print(write_result("vocabularies", rows, details))


if __name__ == "__main__":
    main()
