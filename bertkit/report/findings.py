"""What is wrong with a pre-training run, and what to change: the findings of its report.

Two losses can be reached without any context. One is the unigram entropy: predict each token by its
frequency. The other is a tenth lower, as a tenth of the targets are shown unchanged (paper, A.1):
repeat the token at the target. A run stays there until attention forms, which takes long if the
learning rate is low or the batch is small; many issues report this plateau near 7
(google-research/bert#746, huggingface/transformers#3983).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import read_optional

Record = dict[str, Any]
CONTEXT_MARGIN = 0.03
"""A loss this share of the unigram entropy below what needs no context is learning."""
RISE = 0.1
"""The rise of the smoothed training loss above its lowest value, in nats, that is no chance."""
SETTLED = 200
"""The updates after the warm-up by which the loss should be below the unigram entropy."""
MANY_EXAMPLES = 500_000
"""The examples by which sentence pairs should be answered better than by chance."""
MAX_GAP = 0.3
"""The gap between the held-out and the training loss, in nats, from which a run overfits."""
MAX_COPIES, MAX_UNKNOWN = 0.01, 0.005
"""The shares of copied documents and of [UNK] tokens above which a corpus is reported."""
SCANNED_DOCUMENTS = 200_000


def run_findings(run: Path, records: Sequence[Record]) -> list[str]:
    """Return what is wrong with a run, each finding with its numbers and advice; [] if nothing is.

    Args:
        run: the run directory; the store that its `recipe.json` names is read if it is still there.
        records: the records of its journal.
    """
    settings = read_optional(run / "recipe.json", file_names=True)
    training = (settings.get("recipe") or {}).get("training") or {}
    learning = learning_findings(records, training.get("warmup_steps") or 0)
    return [*learning, *store_findings([Path(str(settings.get("store"))), run / "store"])]


def learning_findings(records: Sequence[Record], warmup: int) -> Iterator[str]:
    """Yield what the journal shows about the learning rate, the plateau and overfitting."""
    starts, ends, steps, evaluations = (
        [record for record in records if record.get("kind") == kind]
        for kind in ("start", "end", "step", "evaluation")
    )
    if ends and ends[-1].get("reason") == "diverged":
        yield (
            "The loss or the gradient became NaN or infinite: start a new run with a lower "
            "training.learning_rate or more training.warmup_steps."
        )
    start = starts[-1] if starts else {}
    phase = [r for r in steps if r.get("phase") == steps[-1].get("phase")]
    name = next((n for n in ("mlm_loss", "lm_loss") if phase and phase[-1].get(n)), "")
    losses = values(phase, name)
    if len(losses) < 6:
        return
    width = len(losses) // 6
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    level, step = float(smooth[-1]), int(phase[-1]["step"])
    if level > smooth.min() + RISE:
        yield (
            f"The training loss rose by {level - smooth.min():.2f} above its lowest value and did "
            "not fall again: lower training.learning_rate, or raise training.warmup_steps."
        )
    entropy = (start.get("baselines") or {}).get("unigram_entropy")
    if entropy:
        total = start.get("steps_total") or step
        late = 2 * step > total or step > 10_000
        settled = step > warmup + SETTLED
        yield from plateau_findings(level, float(entropy), name, settled=settled, late=late)
    yield from pair_findings(phase[-2 * width :], start, steps)
    held_out = values([e for e in evaluations if e.get("phase") == phase[-1].get("phase")], name)
    if len(held_out) and held_out[-1] - level > MAX_GAP:
        yield (
            f"The held-out loss {held_out[-1]:.2f} is {held_out[-1] - level:.2f} above the training"
            f" loss (its lowest value was {held_out.min():.2f}): the network memorizes the corpus. "
            "Use more text, fewer updates, model.dropout 0.1 or a smaller network."
        )


def plateau_findings(
    level: float, entropy: float, name: str, *, settled: bool, late: bool
) -> Iterator[str]:
    """Yield whether a loss could be reached without context, late enough to say so."""
    blind = entropy if name == "lm_loss" else 0.9 * entropy
    if level > entropy and settled:
        yield (
            f"The loss {level:.2f} is above the unigram entropy {entropy:.2f}, which guessing by "
            "frequency reaches: raise training.learning_rate (1e-4 suits BERT-base, 1e-3 networks "
            "of width 128), or train longer."
        )
    elif level > blind - CONTEXT_MARGIN * entropy and late:
        yield (
            f"The loss {level:.2f} needs no context: guessing by frequency reaches {entropy:.2f} "
            f"and repeating the shown token about {blind:.2f}. Attention forms sooner with shorter "
            "examples at first (phases.lengths 64), larger batches, a higher "
            "training.learning_rate, model.dropout 0 for small networks, or more updates."
        )


def pair_findings(late: Sequence[Record], start: Record, steps: Sequence[Record]) -> Iterator[str]:
    """Yield whether sentence pairs are answered by chance after many examples."""
    majority = (start.get("baselines") or {}).get("nsp_majority")
    seen = sum(record.get("sequences") or 0 for record in steps)
    for name in ("nsp_accuracy", "sop_accuracy"):
        shares = values(late, name)
        if len(shares) and majority and seen > MANY_EXAMPLES and shares.mean() < majority + 0.03:
            yield (
                f"{shares.mean():.1%} of the sentence pairs are answered correctly after {seen:,} "
                f"examples, and the more frequent answer alone gets {majority:.1%}: check that "
                "documents are whole and their sentences in order."
            )


def store_findings(folders: Sequence[Path]) -> Iterator[str]:
    """Yield what is wrong with a corpus (the first store of some folders): copies and [UNK]."""
    folder = next((path for path in folders if (path / "manifest.json").is_file()), None)
    if folder is None:
        return
    try:
        store = TokenStore(folder)
        copies, unknown = copied_share(store), unknown_share(store)
    except BertkitError as error:  # the run itself is fine
        yield f"The corpus cannot be checked: {error}"
        return
    if copies > MAX_COPIES:
        yield (
            f"{copies:.1%} of the documents are copies of earlier ones: remove them with `bertkit "
            "clean`, as the network memorizes them."
        )
    if unknown > MAX_UNKNOWN:
        yield (
            f"{unknown:.1%} of the tokens are [UNK]: the vocabulary lacks characters of the text. "
            "Learn one from this text (`bertkit learn`), or use one of its language."
        )


def copied_share(store: TokenStore) -> float:
    """Return the share of exact copies among the first documents of a store."""
    seen: set[int] = set()
    count = 0
    for index in range(len(store.shards)):
        arrays = store.arrays(index)
        bounds = arrays.sentences[arrays.documents].astype(np.int64).tolist()
        for first, end in pairwise(bounds):
            seen.add(hash(arrays.tokens[first:end].tobytes()))
            count += 1
            if count == SCANNED_DOCUMENTS:
                return 1 - len(seen) / count
    return 1 - len(seen) / max(1, count)


def unknown_share(store: TokenStore) -> float:
    """Return the share of [UNK] among the tokens of a store."""
    return float(store.unigrams[store.tokenizer.unk_id]) / max(1, store.tokens)


def values(records: Sequence[Record], name: str) -> np.ndarray:
    """Return a field's numbers: (records that have one,) float64."""
    return np.array([r[name] for r in records if r.get(name) is not None], dtype=np.float64)
