"""An explanation as one HTML page that needs nothing else: no network, no library.

The page carries every attention weight as one byte; `explain.js` draws the panel from them.
"""

from __future__ import annotations

import base64

import numpy as np

from bertkit.errors import BertkitError
from bertkit.explain.sections import attention_accuracy, trace_sections
from bertkit.explain.steps import printable
from bertkit.explain.trace import Trace
from bertkit.model.heads import count_parameters
from bertkit.report.html import render_page

MAX_PAGE_WEIGHTS = 24_000_000
"""Attention weights of a page: more would load slowly. BERT base with 400 tokens has fewer."""
QUESTION = {"nsp": "next-sentence prediction", "sop": "sentence order"}


def explanation_page(trace: Trace) -> str:
    """Return an explanation as one self-contained HTML page.

    Raises:
        BertkitError: there are more attention weights than a page takes.
    """
    weights = trace.inside.attention
    if weights.size > MAX_PAGE_WEIGHTS:
        layers, heads, tokens, _ = weights.shape
        fitting = int((MAX_PAGE_WEIGHTS / (layers * heads)) ** 0.5)
        raise BertkitError(
            f"a page would hold {weights.size:,} attention weights; shorten the example from "
            f"{tokens} to {fitting} tokens, or leave --html out"
        )
    return render_page(
        "explain.html",
        title=f"{printable(trace.texts[0][:40])}: bertkit explain",
        trace=trace,
        printable=printable,
        cards=explanation_cards(trace),
        sections=trace_sections(trace),
        targets={target.position: target for target in trace.targets},
        attention_accuracy=attention_accuracy(trace),
        data={
            "tokens": [printable(token.shown) for token in trace.tokens],
            "layers": weights.shape[0],
            "heads": weights.shape[1],
            "entropy": trace.inside.entropy.mean(-1).round(3).tolist(),
            "weights": base64.b64encode(weight_bytes(weights)).decode(),
        },
    )


def explanation_cards(trace: Trace) -> list[tuple[str, str, str]]:
    """Return the headline numbers as (name, value, what to compare it with)."""
    config = trace.config
    loss = "–" if trace.mlm_loss is None else f"{trace.mlm_loss:.3f}"
    following = "–" if trace.next_probability is None else f"{trace.next_probability:.1%}"
    return [
        ("tokens", str(len(trace.tokens)), f"at most {config.max_position_embeddings:,}"),
        (
            "layers x heads",
            f"{config.num_hidden_layers} x {config.num_attention_heads}",
            f"width {config.hidden_size:,}, {count_parameters(config):,} parameters",
        ),
        ("MLM loss", loss, f"{len(trace.targets)} targets, seed {trace.seed}"),
        ("second text follows", following, QUESTION[trace.pairs]),
    ]


def weight_bytes(weights: np.ndarray) -> bytes:
    """Store 255 times the square root of each weight, rounded, so that small weights survive."""
    return np.rint(255 * np.sqrt(weights)).astype(np.uint8).tobytes()
