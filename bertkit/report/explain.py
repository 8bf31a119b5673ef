"""Follow one example through a model, from its text to its losses, for `bertkit explain`.

The kernels never hold attention weights, so they are computed here from the query and key of each
layer (Vaswani et al. 2017, section 3.2.1). The rest of the layer is computed from them, and the
result is compared with the encoder's own. "Paper" is Devlin et al. 2018.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import rich.console
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from bertkit.checkpoints.pretrained import model_folder, read_pretrained
from bertkit.errors import BertkitError
from bertkit.model.encoder import ONE_SEGMENT, Encoder, Layer, ModelConfig, activation
from bertkit.model.heads import PretrainingModel
from bertkit.model.outputs import attention_weights
from bertkit.predict.load import load_predictor
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.pretraining_data.examples import MaskingOptions, draw_masks
from bertkit.processes import MASKS, keyed_rng
from bertkit.tasks.types import is_tuned
from bertkit.tokenizer.wordpiece import Tokenizer

SHOWN_TOKENS, SHOWN_CANDIDATES = 3, 5
MIN_PROBABILITY = 1e-38
"""Stands for a probability of 0 in a logarithm; it is about the smallest number of fp32."""


@dataclass(frozen=True)
class Guess:
    """The network's prediction at a target."""

    position: int
    token: str
    """The true token."""
    shown: str
    """The token that the network reads in its place: [MASK], a random or the true one."""
    probability: float
    """The probability of the true token."""
    rank: int
    """The rank of the true token among all; 1 is the most probable."""
    top: list[tuple[str, float]]
    """The most probable tokens with their probabilities."""


@dataclass(frozen=True)
class Trace:
    """What `bertkit explain` shows about one example."""

    config: ModelConfig
    tokens: list[str]
    """The input sequence as the network reads it."""
    ids: list[int]
    segments: list[int]
    attention: np.ndarray
    """(layers, heads, tokens, tokens) the weight of each token (last) for each token."""
    difference: float
    """The largest difference of hidden states by these weights from the encoder's own."""
    guesses: list[Guess]
    """One prediction for each target; empty if the model has no language head."""
    in_order: float | None
    """The probability that the second text follows the first; None without a pair or a head."""
    task: str
    """The prediction of a fine-tuned model; "" for other models."""

    @property
    def mlm_loss(self) -> float | None:
        """The mean loss over the targets, in nats."""
        losses = [-math.log(max(guess.probability, MIN_PROBABILITY)) for guess in self.guesses]
        return sum(losses) / len(losses) if losses else None


@torch.inference_mode()
def trace_example(model: Path | str, text: str, pair: str | None = None, *, seed: int = 0) -> Trace:
    """Trace one example through a model.

    A model with a language head reads the masked sequence, as in its training; any other model
    reads the text as it is.
    """
    start = read_pretrained(model)
    tokenizer, config = start.tokenizer, start.config
    if pair is not None and config.type_vocab_size == 1:
        raise BertkitError(ONE_SEGMENT)
    encoded = tokenizer.encode_pair(text, pair)
    if len(encoded.ids) > config.max_position_embeddings:
        raise BertkitError(
            f"the example has {len(encoded.ids):,} tokens and the model reads at most "
            f"{config.max_position_embeddings:,}; shorten it"
        )
    if max(encoded.text_index) < 0:
        raise BertkitError("the text has no tokens; give one with words")
    texts = [text] if pair is None else [text, pair]
    answer = task_answer(start.path, texts)
    loaded = start.build(PretrainingModel, keep_head=True)
    network, ids = loaded.model.eval(), np.array(encoded.ids)
    lacks = {part for part in HEAD_PARTS if any(part in name for name in loaded.missing_keys)}
    targets = np.zeros(0, dtype=np.int64)
    if "mlm." not in lacks and config.direction == "bidirectional":
        maskable = np.flatnonzero(np.array(encoded.text_index) >= 0)
        mask_id, rng = tokenizer.mask_id, keyed_rng(seed, MASKS)
        targets, ids[targets] = draw_masks(
            *(ids, maskable, tokenizer.continuation, len(ids), MaskingOptions(), mask_id, rng)
        )
    packed = pack([ids.tolist()], [encoded.segment_ids])
    output = network(packed, torch.from_numpy(targets).long())
    following = None if pair is None or lacks & {"nsp.", "pooler."} else output.nsp_logits
    attention, difference = look_inside(network.encoder, packed)
    return Trace(
        config=config,
        tokens=[tokenizer.vocabulary[index] for index in ids.tolist()],
        ids=ids.tolist(),
        segments=list(encoded.segment_ids),
        attention=attention,
        difference=difference,
        guesses=[
            judge_target(position, encoded.ids[position], int(ids[position]), row, tokenizer)
            for position, row in zip(targets.tolist(), output.mlm_logits.float(), strict=True)
        ],
        in_order=None if following is None else float(following.float().softmax(-1)[0, 0]),
        task=answer,
    )


HEAD_PARTS = ("mlm.", "nsp.", "pooler.")
"""Parts of the names of the weights of the pre-training heads."""


def judge_target(
    position: int, true: int, shown: int, logits: Tensor, tokenizer: Tokenizer
) -> Guess:
    """Return the prediction at a target from its logits, (rows of the embeddings,)."""
    shares, names = logits.softmax(-1), tokenizer.vocabulary
    best = shares[: tokenizer.size].topk(min(SHOWN_CANDIDATES, tokenizer.size))
    return Guess(
        position=position,
        token=names[true],
        shown=names[shown],
        probability=float(shares[true]),
        rank=1 + int((shares > shares[true]).sum()),
        top=[
            (names[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    )


def task_answer(model: Path, texts: Sequence[str]) -> str:
    """Return the prediction of a fine-tuned model for one text or two as JSON; "" for others."""
    if not is_tuned(model_folder(model)):
        return ""
    predictor = load_predictor(model, device="cpu", precision="fp32")
    if predictor.task.task_type not in TEXT_TASKS:
        return f"a model for {predictor.task.task_type}; see `bertkit predict`"
    return json.dumps(predictor(*texts).to_dict(), ensure_ascii=False)


TEXT_TASKS = ("classification", "multi-label-classification", "regression")


@torch.inference_mode()
def look_inside(encoder: Encoder, packed: Packed) -> tuple[np.ndarray, float]:
    """Run one sequence without dropout; return the weights and the difference of a `Trace`."""
    states = encoder.layers_of(packed)
    weights, difference = [], 0.0
    for layer, (before, after) in zip(encoder.stack, pairwise(states), strict=True):
        assert isinstance(layer, Layer)
        shares, value = attention_weights(layer, before)
        attended = torch.einsum("hqk,khd->qhd", shares, value).flatten(1)
        hidden = layer.attention_norm(layer.attention_output(attended) + before)
        expanded = activation(layer.intermediate(hidden), layer.config)
        again = layer.output_norm(layer.output(expanded) + hidden)
        difference = max(difference, float((again - after).abs().max()))
        weights.append(shares)
    return torch.stack(weights).numpy(), difference


def print_explanation(trace: Trace, console: rich.console.Console) -> None:
    """Print a trace, with the mean attention of the last layer's heads."""

    def show(title: str, meaning: str, columns: Sequence[str] = (), rows: Rows = ()) -> None:
        console.print(Text(f"\n{title}", style="bold"))
        console.print(Text(meaning))
        if columns:
            table = Table(box=None, pad_edge=False, header_style="dim")
            for name in columns:
                table.add_column(name.removeprefix(">"), justify="right" if ">" in name else "left")
            for row in rows:
                table.add_row(*(Text(printable(str(cell))) for cell in row))
            console.print(table)

    inputs = zip(range(len(trace.tokens)), trace.tokens, trace.ids, trace.segments, strict=True)
    columns = (">position", "token", ">id", ">segment")
    show("Input sequence (paper, section 3 and figure 2)", INPUT, columns, list(inputs))
    show_attention(trace, show)
    if trace.guesses:
        targets = [
            (g.position, g.token, g.shown, g.rank, f"{g.probability:.3f}", top_text(g.top))
            for g in trace.guesses
        ]
        names = (">position", "true", "shown", ">rank", ">probability", "most probable")
        show("Masked language model (paper, section 3.1, task 1)", MLM, names, targets)
        console.print(Text(f"Mean loss: {trace.mlm_loss:.4f} nats."))
    if trace.in_order is not None:
        answer = f"The second text follows the first with probability {trace.in_order:.4f}."
        show("Sentence pair (paper, section 3.1, task 2)", answer)
    if trace.task:
        show("Fine-tuned head (paper, section 3.2)", trace.task)


Rows = Sequence[Sequence[object]]
INPUT = (
    "Each word is split greedily: the longest prefix in the vocabulary becomes a token, then the "
    "longest prefix of the rest, written with ## (WordPiece, Wu et al. 2016). [CLS] comes first "
    "and [SEP] ends each text. A model with a language head reads [MASK] or a random token at most "
    "targets, drawn as in pre-training (15 % of the tokens; paper, A.1)."
)
MLM = "The loss is the negative logarithm of the probability of the true token, averaged."


def show_attention(trace: Trace, show: Callable[..., None]) -> None:
    """Show what each token attends to most in the mean of the last layer's heads."""
    rows = []
    for position, row in enumerate(trace.attention[-1].mean(0)):
        best = np.argsort(-row, kind="stable")[:SHOWN_TOKENS].tolist()
        named = ", ".join(f"{trace.tokens[i]} ({i}) {row[i]:.0%}" for i in best)
        rows.append((position, trace.tokens[position], named))
    meaning = (
        "The mean of the last layer's heads; the page of `bertkit serve` shows every head. "
        "Recomputing the layers from such weights gives the encoder's hidden states to within "
        f"{trace.difference:.1e}."
    )
    title = "Attention (paper, section 3; Vaswani et al. 2017, section 3.2)"
    show(title, meaning, (">", "token", "attends most to"), rows)


def top_text(candidates: Sequence[tuple[str, float]]) -> str:
    """Return candidates with their probabilities as text."""
    return ", ".join(f"{token} {share:.0%}" for token, share in candidates)


def printable(text: str) -> str:
    r"""Escape characters that cannot be seen or printed, such as \\n, \\xa0 or \\u200b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
