"""An explanation as one HTML page that needs nothing else: no network, no library.

`page.css` and `page.js`, which draws the attention panel, are put into the page together with the
weights, a byte each.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from bertkit.errors import BertkitError
from bertkit.explain.steps import EMBEDDING_PARTS, SAME, Stage, Token, printable
from bertkit.explain.trace import Trace
from bertkit.explain.wording import (
    describe_answers,
    describe_matches,
    divide_words,
    masks_in_words,
    pooled_in_words,
    trace_sections,
    widest_entropy,
)
from bertkit.files import write_text
from bertkit.model.heads import count_parameters
from bertkit.report.html import card_list, folded, html_page, html_table

MOST_WEIGHTS = 24_000_000
"""Attention weights of a page: more would be slow to load. Base with 400 tokens is below."""
QUESTION = {"nsp": "next-sentence prediction", "sop": "sentence order"}


def write_page(path: Path, trace: Trace) -> None:
    """Write an explanation as one self-contained page.

    Raises:
        BertkitError: the example has too many tokens for a page, or the file cannot be written.
    """
    write_text(path, explanation_page(trace))


def explanation_page(trace: Trace) -> str:
    """The whole page as HTML.

    Raises:
        BertkitError: the attention weights are more than a page takes.
    """
    size = trace.inside.attention.size
    if size > MOST_WEIGHTS:
        layers, heads, tokens, _ = trace.inside.attention.shape
        fitting = int((MOST_WEIGHTS / (layers * heads)) ** 0.5)
        raise BertkitError(
            f"a page would hold {size:,} attention weights; shorten the example from {tokens} to "
            f"{fitting} tokens, or leave --html out"
        )
    shown = trace_sections(trace)
    links = "".join(f'<a href="#{key}">{escape(one.title)}</a>' for key, one in shown)
    parts = [page_heading(trace), f"<nav>{links}</nav>"]
    for key, section in shown:
        reason = trace.left_out.get(key)
        body = f"<p>Not shown: {escape(reason)}.</p>" if reason else DRAWN[key](trace)
        modules = ", ".join(f"<code>{escape(module)}</code>" for module in section.modules)
        parts.append(
            f'<section id="{key}"><h2>{escape(section.title)}</h2>'
            f'<p class="place">{escape(section.place)} | {modules}</p>'
            f"<p>{escape(section.meaning)}</p>{body}</section>"
        )
    parts.append(script(trace))
    whole = html_page(f"{printable(trace.texts[0][:40])}: bertkit explain", parts)
    return whole.replace("</style>", own_file("page.css") + "</style>", 1)


def page_heading(trace: Trace) -> str:
    """The example, the model, and the headline numbers."""
    texts = "".join(f"<p><q>{escape(printable(text))}</q></p>" for text in trace.texts)
    config = trace.config
    loss = "–" if trace.mlm_loss is None else f"{trace.mlm_loss:.3f}"
    following = "–" if trace.next_probability is None else f"{trace.next_probability:.1%}"
    cards = card_list(
        [
            ("tokens", str(len(trace.tokens)), f"at most {config.max_position_embeddings:,}"),
            (
                "layers x heads",
                f"{config.num_hidden_layers} x {config.num_attention_heads}",
                f"width {config.hidden_size:,}, {count_parameters(config):,} parameters",
            ),
            ("MLM loss", loss, f"{len(trace.targets)} targets, seed {trace.seed}"),
            ("second text follows", following, QUESTION[trace.pairs]),
        ]
    )
    return f"<h1>One example through {escape(trace.model)}</h1>{texts}{cards}"


def normalized_html(trace: Trace) -> str:
    """Each text after each step."""
    names = ["step", "text", "remark"]
    bodies = [html_table(names, [stage_html(stage) for stage in stages]) for stages in trace.stages]
    return f'<div class="stretch">{"".join(bodies)}</div>'


def stage_html(stage: Stage) -> list[str]:
    """A step; its text only where it is another one."""
    return [stage.name, "" if stage.remark == SAME else printable(stage.text), stage.remark]


def tokens_html(trace: Trace) -> str:
    """The words that are not in the vocabulary whole, and what was tried for them."""
    bodies = []
    for words in trace.words:
        cut_up, whole = divide_words(words)
        rows = [
            [printable(cut.word), " ".join(cut.pieces), describe_matches(cut)] for cut in cut_up
        ]
        names = ["word", "pieces", "not in the vocabulary, longest first"]
        bodies.append(f"<p>{len(whole)} of {len(words)} words are in the vocabulary whole.</p>")
        bodies.append(html_table(names, rows) if rows else "")
    return "".join(bodies)


def sequence_html(trace: Trace) -> str:
    """The tokens one after another, and a table of them."""
    strip = "".join(
        f'<span class="{"second" if token.segment else "first"}">{escape(printable(token.piece))}'
        "</span>"
        for token in trace.tokens
    )
    rows = [
        [str(position), printable(token.piece), token.id, token.segment, *raw_html(trace, token)]
        for position, token in enumerate(trace.tokens)
    ]
    columns = ["position", "piece", "id", "segment", "characters", "text"]
    note = "<p>Underlined: segment 1.</p>" if len(trace.texts) > 1 else ""
    shown = folded("ids, segments, positions, characters", html_table(columns, rows))
    return f'<div class="strip">{strip}</div>{note}{shown}'


def raw_html(trace: Trace, token: Token) -> list[str]:
    """The raw text of a token: its span, and what stands there."""
    if token.text < 0:
        return ["", ""]
    text = trace.texts[token.text][token.start : token.end]
    return [f"{token.start}-{token.end}", printable(text)]


def masks_html(trace: Trace) -> str:
    """The sequence with targets marked; what they really are stands behind."""
    targets = {target.position: target for target in trace.targets}
    chips = []
    for position, token in enumerate(trace.tokens):
        target = targets.get(position)
        if target is None:
            chips.append(f"<span>{escape(printable(token.piece))}</span>")
        else:
            true = (
                ""
                if target.kind == "kept"
                else f" <small>was {escape(printable(target.piece))}</small>"
            )
            shown = escape(printable(target.shown))
            chips.append(f'<span class="target" title="{target.kind}">{shown}{true}</span>')
    words = escape(masks_in_words(trace))
    return f'<p>{words}</p><div class="strip">{"".join(chips)}</div>'


def embeddings_html(trace: Trace) -> str:
    """Lengths of the vectors of each token."""
    rows = [
        [str(position), printable(token.seen), *(f"{value:.3f}" for value in row)]
        for position, (token, row) in enumerate(
            zip(trace.tokens, trace.inside.embeddings.tolist(), strict=True)
        )
    ]
    shown = html_table(["position", "read", *EMBEDDING_PARTS], rows)
    return f'<div class="numbers">{folded("every token", shown)}</div>'


def attention_html(trace: Trace) -> str:
    """The frame that `page.js` fills."""
    return (
        "<p>Choose a layer and a head, then point at a token; arrow keys walk through either. The "
        'last layer is on top.</p><p id="chosen" aria-live="polite"></p><div class="panel">'
        '<div><h3>Layers and heads</h3><div class="wide"><table id="heads"></table></div></div>'
        '<div class="looks"><h3>What a token looks at</h3><div id="tokens"></div>'
        '<p id="looks" aria-live="polite"></p></div></div>'
        "<h3>Heat map</h3><p>A row is a token that looks, a column one that is looked at.</p>"
        '<div class="wide"><canvas id="map" role="img" aria-label="heat map of the weights; the '
        'tokens above say the same"></canvas></div>'
        "<noscript><p>This panel needs JavaScript.</p></noscript>"
        "<p>These weights, put through the rest of each layer, give the encoder's own hidden "
        f"states to within {trace.inside.difference:.1e}.</p>"
    )


def layers_html(trace: Trace) -> str:
    """Lengths of hidden states and entropies, layer by layer, then token by token."""
    rows = []
    for number, norms in enumerate(trace.inside.norms):
        entropy = trace.inside.entropy[number - 1].mean(-1) if number else np.zeros(0)
        by_head = ", ".join(f"{value:.2f}" for value in entropy)
        mean = f"{entropy.mean():.3f}" if number else ""
        name = f"layer {number}" if number else "input"
        rows.append([name, f"{norms.mean():.3f}", f"{norms[0]:.3f}", mean, by_head])
    heads = ["", "mean length", "of [CLS]", "entropy", "of each head"]
    tokens = [
        [str(position), printable(token.seen), *(f"{value:.2f}" for value in column)]
        for position, (token, column) in enumerate(
            zip(trace.tokens, trace.inside.norms.T.tolist(), strict=True)
        )
    ]
    names = ["position", "read", *(row[0] for row in rows)]
    widest = f"<p>The widest possible entropy is ln {len(tokens)} = {widest_entropy(trace)}.</p>"
    lengths = folded("length of every token's state", html_table(names, tokens))
    return f'<div class="numbers">{html_table(heads, rows)}{widest}{lengths}</div>'


def pooler_html(trace: Trace) -> str:
    """The pooled vector in words."""
    return f"<p>{escape(pooled_in_words(trace))}</p>"


def masked_loss_html(trace: Trace) -> str:
    """What the network says at each target."""
    rows = []
    for target, guess in zip(trace.targets, trace.guesses, strict=True):
        numbers = [str(guess.rank), f"{guess.probability:.2%}", f"{guess.loss:.3f}"]
        top = ", ".join(f"{printable(one.piece)} {one.probability:.1%}" for one in guess.top)
        rows.append([str(target.position), printable(target.piece), target.kind, *numbers, top])
    names = ["position", "true piece", "shown", "rank", "probability", "loss", "most probable"]
    mean = f"<p>Mean loss: {trace.mlm_loss:.4f}.</p>"
    return f'<div class="numbers">{html_table(names, rows)}</div>{mean}'


def next_loss_html(trace: Trace) -> str:
    """Both answers and what each would cost."""
    rows = [[name, f"{p:.4f}", f"{loss:.4f}"] for name, p, loss in describe_answers(trace)]
    return html_table(["answer", "probability", "loss, if it is true"], rows)


def task_html(trace: Trace) -> str:
    """The answer of a fine-tuned head."""
    return f"<p>{escape(trace.task)}.</p>"


DRAWN: dict[str, Callable[[Trace], str]] = {
    "normalisation": normalized_html,
    "pieces": tokens_html,
    "input": sequence_html,
    "masks": masks_html,
    "embeddings": embeddings_html,
    "attention": attention_html,
    "layers": layers_html,
    "pooler": pooler_html,
    "mlm": masked_loss_html,
    "nsp": next_loss_html,
    "task": task_html,
}
"""Key of a section -> its body."""


def script(trace: Trace) -> str:
    """The weights and what draws them."""
    weights = trace.inside.attention
    content = {
        "pieces": [printable(token.seen) for token in trace.tokens],
        "layers": weights.shape[0],
        "heads": weights.shape[1],
        "entropy": trace.inside.entropy.mean(-1).round(3).tolist(),
        "weights": base64.b64encode(as_bytes(weights)).decode(),
    }
    data = json.dumps(content).replace("<", "\\u003c")  # "</script>" in a text ends nothing
    return (
        f'<script type="application/json" id="trace">{data}</script>'
        f"<script>{own_file('page.js')}</script>"
    )


def own_file(name: str) -> str:
    """The text of a file that lies beside this one."""
    return (files("bertkit.explain") / name).read_text(encoding="utf-8")


def as_bytes(weights: np.ndarray) -> bytes:
    """255 times the square root of each weight, rounded: a weight of 1e-5 is not lost."""
    return np.rint(255 * np.sqrt(weights)).astype(np.uint8).tobytes()
