"""Tracing one example through a model, from characters to losses, for `bertkit explain`.

A pre-training model reads the masked sequence, as in its training; any other model reads the
original text, and the masks that pre-training would draw are only shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder, read_pretrained
from bertkit.errors import BertkitError
from bertkit.explain.steps import (
    Inside,
    Stage,
    Target,
    Token,
    TokenizedWord,
    look_inside,
    mask,
    normalize,
    recorded_masking,
    tokenize_words,
)
from bertkit.model.encoder import ONE_SEGMENT, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.predict.load import is_tuned, load
from bertkit.predict.predictors import TextPredictor
from bertkit.predict.pretrained import MASK, MaskCandidate
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.tasks.regression import ValuePrediction
from bertkit.tokenizer.wordpiece import Tokenizer

TOP = 5
"""The number of candidates that are shown for a target."""

PRETRAINING_HEADS = {
    "mlm": "mlm.",
    "nsp": "nsp.",
    "pooler": "encoder.pooler.",
}
"""Section of a head -> the prefix of its parameter names in a file."""


class Guess(NamedTuple):
    """The network's prediction at a target."""

    probability: float
    """The probability of the true token."""
    loss: float
    rank: int
    """The rank of the true token among all; 1 is the most probable."""
    top: tuple[MaskCandidate, ...]


@dataclass(frozen=True)
class Trace:
    """All that `bertkit explain` shows about one example."""

    model: str
    config: ModelConfig
    tokenizer: Tokenizer
    texts: tuple[str, ...]
    stages: tuple[list[Stage], ...]
    """The steps of normalisation, for each text."""
    words: tuple[list[TokenizedWord], ...]
    """The words, for each text."""
    tokens: list[Token]
    seed: int
    masking: MaskingOptions
    targets: list[Target]
    masked: bool
    """Whether the network reads the masked sequence, or the original text."""
    inside: Inside
    pooled: np.ndarray | None
    """(width,) the pooled vector; None if the model has no pooler."""
    guesses: list[Guess]
    """One prediction for each target; empty if the "mlm" section is left out."""
    mlm_loss: float | None
    """The mean loss over the targets, in nats."""
    next_probability: float | None
    """The probability of class 0 of the pair objective, that the texts are in order."""
    pairs: str
    """The objective of the pair head: "nsp", or "sop" (ALBERT)."""
    task: str
    """The prediction of a fine-tuned model; "" if the model is not fine-tuned."""
    left_out: dict[str, str]
    """Key of a section -> why it has nothing to show."""


def trace_example(model: Path | str, text: str, pair: str | None = None, *, seed: int = 0) -> Trace:
    """Trace one example through a model.

    Args:
        model: a checkpoint that `bertkit.checkpoints.pretrained.read_pretrained` can read.
        text: the first text.
        pair: the second text, if there is one.
        seed: the seed of the masks.

    Raises:
        BertkitError: there is no such model, a text is empty or holds [MASK], the sequence is
            longer than the model, or the seed is out of range.
    """
    if not 0 <= seed < 1 << 63:
        raise BertkitError(f"--seed must be 0 or more, and below 2^63, got {seed}")
    start = read_pretrained(Path(model))
    if pair is not None and start.config.type_vocab_size == 1:
        raise BertkitError(ONE_SEGMENT)
    texts = (text,) if pair is None else (text, pair)
    encoded = [start.tokenizer.encode(part) for part in texts]
    check_texts(texts, [len(part.ids) for part in encoded], start.config)

    loaded = start.build(PretrainingModel, keep_head=True)
    left_out = missing_heads(loaded.missing_keys, start, pair)
    masked = "mlm" not in left_out
    masking = recorded_masking(start.details)
    tokens, targets = mask(start.tokenizer, texts, masking, seed, masked=masked)
    if masked and not targets:
        left_out["mlm"] = "no whole word is short enough to be a target; give a longer text"
    ids = {token: index for index, token in enumerate(start.tokenizer.vocabulary)}
    packed = pack([[ids[token.shown] for token in tokens]], [[token.segment for token in tokens]])

    inside = look_inside(loaded.model.encoder, packed)
    guesses, following = judge_next_sentence(loaded.model, packed, start.tokenizer, tokens, targets)
    if "mlm" in left_out:
        guesses = []
    return Trace(
        model=str(model),
        config=start.config,
        tokenizer=start.tokenizer,
        texts=texts,
        stages=tuple(normalize(part, start.tokenizer) for part in texts),
        words=tuple(
            tokenize_words(part, found, start.tokenizer)
            for part, found in zip(texts, encoded, strict=True)
        ),
        tokens=tokens,
        seed=seed,
        masking=masking,
        targets=targets,
        masked=masked,
        inside=inside,
        pooled=None if "pooler" in left_out else pool(loaded.model, packed, inside),
        guesses=guesses,
        mlm_loss=sum(guess.loss for guess in guesses) / len(guesses) if guesses else None,
        next_probability=None if "nsp" in left_out else following,
        pairs=start.pair,
        task=task_says(start.path, texts),
        left_out=left_out,
    )


def check_texts(texts: tuple[str, ...], counts: list[int], config: ModelConfig) -> None:
    """Check that texts can be shown as one sequence.

    Raises:
        BertkitError: they cannot; the message says what to change.
    """
    for text, count in zip(texts, counts, strict=True):
        if not count:
            raise BertkitError(f"the text {text[:40]!r} has no tokens; give one with words")
        if MASK in text:
            raise BertkitError(
                f"explain draws its masks itself (--seed), so leave {MASK} out of the text; "
                f"bertkit predict fill-mask fills your own"
            )
    tokens, max_length = sum(counts) + len(texts) + 1, config.max_position_embeddings
    if tokens > max_length:
        raise BertkitError(
            f"the example has {tokens:,} tokens with [CLS] and [SEP] and the model reads at most "
            f"{max_length:,}; explain shows one sequence, so shorten it by "
            f"{tokens - max_length:,} tokens"
        )


def missing_heads(new: list[str], start: PretrainedWeights, pair: str | None) -> dict[str, str]:
    """Return key of a section -> why it has nothing to show."""
    left_out = {}
    for key, prefix in PRETRAINING_HEADS.items():
        if any(name.startswith(prefix) for name in new):
            left_out[key] = f"the model has no such head ({prefix.rstrip('.')})"
    if start.config.direction != "bidirectional":
        left_out["mlm"] = "the model reads left to right and learns the next token, not masked ones"
    if "pooler" in left_out:
        left_out.setdefault("nsp", "the model has no pooler (bert.pooler), which this head reads")
    elif pair is None:
        left_out.setdefault("nsp", "one text was given; it takes two")
    return left_out


@torch.inference_mode()
def pool(model: PretrainingModel, packed: Packed, inside: Inside) -> np.ndarray:
    """Return the pooled vector, (width,)."""
    encoder = model.encoder
    return encoder.pool(inside.last[encoder.summary_tokens(packed).long()])[0].numpy()


@torch.inference_mode()
def judge_next_sentence(
    model: PretrainingModel,
    packed: Packed,
    tokenizer: Tokenizer,
    tokens: list[Token],
    targets: list[Target],
) -> tuple[list[Guess], float]:
    """Return a prediction for each target, and the probability of class 0 of the pair head."""
    output = model(packed, torch.tensor([t.position for t in targets], dtype=torch.int64))
    logs = output.mlm_logits.float().log_softmax(-1)  # over all rows of the embeddings
    guesses = []
    for target, row in zip(targets, logs, strict=True):
        true = row[tokens[target.position].id]
        best = row[: tokenizer.size].topk(min(TOP, tokenizer.size))
        candidates = [tokenizer.vocabulary[i] for i in best.indices.tolist()]
        top = tuple(map(MaskCandidate, candidates, best.values.exp().tolist()))
        rank = 1 + int((row > true).sum())
        guesses.append(Guess(float(true.exp()), -float(true), rank, top))
    return guesses, float(output.nsp_logits.float().softmax(-1)[0, 0])


def task_says(model: Path, texts: tuple[str, ...]) -> str:
    """Describe the prediction of a fine-tuned model for one text or two; "" for other models."""
    if not is_tuned(model_folder(model)):
        return ""
    predictor = load(model, device="cpu", precision="fp32")
    if not isinstance(predictor, TextPredictor):
        kind = predictor.task.task_type if hasattr(predictor, "task") else "a task"
        return f"tuned for {kind}; that head is left out here, see bertkit predict"
    found = predictor(*texts)
    if isinstance(found, ValuePrediction):
        return f"value {found.value:.4f}"
    shares = sorted(found.probabilities.items(), key=lambda item: -item[1])
    return ", ".join(f"{label} {share:.1%}" for label, share in shares)
