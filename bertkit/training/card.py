"""The model card of a pre-trained model, from its run directory: corpus, scores and recipe.

`pretrain` does not write it: the command line does, after the run is finished.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertkit.checkpoints.card import (
    Card,
    Scored,
    inherited_metadata,
    kept_card,
    model_index,
    settings_table,
    skipped_table,
    source_name,
    start_text,
    table,
    write_card,
)
from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder
from bertkit.corpus.store import TokenStore
from bertkit.files import read_object
from bertkit.training.journal import JOURNAL, read_journal

DEFAULT_LANGUAGE = "en"
"""The default of `bertkit prepare`: a user may not have chosen it, so a card does not claim it."""
MAX_NAMES = 20
"""The maximum number of files that a card names."""
TOKEN_TEXTS = {
    "mlm": "to predict masked tokens",
    "clm": "to predict the next token",
    "rtd": "to tell which tokens were replaced (ELECTRA)",
}
PAIR_TEXTS = {
    "nsp": ", and whether a second text follows the first",
    "sop": ", and which of two texts comes first",
}


def write_run_card(run: Path, store: TokenStore, start: PretrainedWeights | None = None) -> str:
    """Write the card of a finished run's model; return a note if its user's own card is kept."""
    for name in ("generator", "model"):
        if (run / name).is_dir():
            write_card(run / name, card_of_run(run, store, start), replaced=run / name)
    return kept_card(run / "model")


def card_of_run(run: Path, store: TokenStore, start: PretrainedWeights | None) -> Card:
    """Return the card of a finished run's model."""
    recorded = read_object(run / "recipe.json", file_names=True)
    recipe = recorded["recipe"]
    evaluations = [r for r in read_journal(run / JOURNAL) if r.get("kind") == "evaluation"]
    scores = held_out_scores(evaluations[-1]) if evaluations else {}
    objectives, steps = recipe["objectives"], sum(recipe["phases"]["steps"])
    learned = TOKEN_TEXTS[objectives["token"]] + PAIR_TEXTS.get(objectives["pair"], "")
    title = f"BERT pre-trained with the recipe {recorded['recipe_name']}"
    metadata = corpus_metadata(store)
    initial = "The weights were initialised at random."
    if start is not None:
        metadata |= inherited_metadata(model_folder(start.path))
        initial = start_text(start.path, start.digest)
    scored = [Scored("held-out documents", "held_out", scores)]
    if index := model_index(title, "fill-mask", scored):
        metadata["model-index"] = index
    return Card(
        title=title,
        summary=(
            f"This is a BERT that was pre-trained {learned}, in {steps:,} updates. It has to be "
            "fine-tuned for most uses, such as the classification of texts."
        ),
        metadata=metadata,
        sections={
            "Data": corpus_text(store),
            "Scores": held_out_text(scores, steps),
            "Settings": settings_table({k: v for k, v in recipe.items() if k != "logging"}),
            "Initial weights": initial,
        },
    )


def corpus_metadata(store: TokenStore) -> dict[str, Any]:
    """Return the language and the hub's data sets of a token store, as far as they are known."""
    language = str((store.manifest.get("settings") or {}).get("language", ""))
    known = re.fullmatch(r"[a-z]{2,3}", language) and language != DEFAULT_LANGUAGE
    paths = [str(source.get("path")) for source in store.manifest.get("sources") or []]
    datasets = sorted({m[1] for path in paths if (m := re.match(r"hf:([\w.-]+/[\w.-]+)", path))})
    return ({"language": [language]} if known else {}) | (
        {"datasets": datasets} if datasets else {}
    )


def corpus_text(store: TokenStore) -> str:
    """Return Markdown about a token store: sources, sizes and what was skipped."""
    manifest = store.manifest
    sources = [source_name(str(source.get("path"))) for source in manifest.get("sources") or []]
    names = ", ".join(f"`{name}`" for name in sources[:MAX_NAMES])
    more = f" and {len(sources) - MAX_NAMES:,} more" if len(sources) > MAX_NAMES else ""
    text = (
        f"The training text has {store.documents:,} documents with {store.sentences:,} sentences "
        f"and {store.tokens:,} tokens, from {len(sources):,} file{'s' * (len(sources) != 1)}"
        f"{f' ({names}{more})' if names else ''}."
    )
    if held_out := TokenStore(store.folder, "held_out").documents:
        text += f" {held_out:,} more documents were held out."
    skipped = (manifest.get("text") or {}).get("skipped") or {}
    return f"{text}\n\n{skipped_table(skipped)}"


def held_out_scores(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of an evaluation record that the hub knows: accuracies and perplexity."""
    return {
        name: float(value)
        for name, value in evaluation.items()
        if name.endswith(("accuracy", "perplexity"))
        and isinstance(value, float | int)
        and math.isfinite(value)
    }


def held_out_text(scores: Mapping[str, float], steps: int) -> str:
    """Return Markdown about the scores on the held-out documents."""
    if not scores:
        return "The model was not evaluated: fewer than two documents were held out."
    rows = [
        (name.replace("_", " "), f"{value:,.4g}" if "perplexity" in name else f"{value:.1%}")
        for name, value in scores.items()
    ]
    return f"On the held-out documents, after {steps:,} updates:\n\n" + table(
        ("score", "value"), rows
    )
