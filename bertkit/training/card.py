"""The model card of a pre-trained model: corpus, held-out scores and recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bertkit.checkpoints.card import (
    Card,
    Scored,
    model_index,
    network_text,
    settings_table,
    skipped_table,
    source_name,
    table,
)
from bertkit.config import as_json
from bertkit.corpus.store import TokenStore
from bertkit.training.journal import JOURNAL, read_journal
from bertkit.training.state import TrainState

if TYPE_CHECKING:
    from bertkit.training.pretrain import Run

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


def card_of_run(run: Run, state: TrainState) -> Card:
    """Return the card of a run's current model, with the journal's scores at this step or before.

    A run that is resumed after its last update has no other record of them.
    """
    evaluations = [
        record
        for record in read_journal(run.folder / JOURNAL)
        if record.get("kind") == "evaluation" and record["step"] <= state.step
    ]
    evaluation = evaluations[-1] if evaluations else {}
    recipe, store, steps = run.recipe, run.store, state.step
    title, pipeline = f"BERT pre-trained with the recipe {run.recipe_name}", "fill-mask"
    learned = TOKEN_TEXTS[recipe.objectives.token] + PAIR_TEXTS.get(recipe.objectives.pair, "")
    planned = recipe.phases.total_steps
    network = network_text(state.model.config, store.tokenizer)
    unfinished = f" The recipe has {planned:,} updates, so training was not finished."
    summary = (
        f"This is a BERT that was pre-trained {learned}, in {steps:,} updates. It has to be "
        "fine-tuned for most uses, such as the classification of texts."
        f"{unfinished if steps < planned else ''} {network}"
    )
    scores, held_out = held_out_scores(evaluation), store.held_out
    index = model_index(title, pipeline, [Scored("held-out documents", "held_out", scores)])
    settings = {k: v for k, v in as_json(recipe).items() if k != "logging"}
    settings["training"] = {**settings["training"], "precision": run.precision}
    metadata = {**corpus_metadata([one for one, _ in store.members]), **run.inherited}
    sections = {
        "Data": "\n\n".join(corpus_text(one, share, bool(scores)) for one, share in store.members),
        "Scores": held_out_text(scores, int(evaluation.get("step", 0)), held_out is None),
        "Settings": settings_table(settings),
        "Initial weights": run.start or "The weights were initialised at random.",
    }
    if index:
        metadata["model-index"] = index
    return Card(title=title, summary=summary, metadata=metadata, sections=sections)


def corpus_metadata(stores: Sequence[TokenStore]) -> dict[str, Any]:
    """Return the languages and the hub's data sets of token stores, as far as they are known."""
    languages, datasets = set[str](), set[str]()
    for store in stores:
        language = str((store.manifest.get("settings") or {}).get("language", ""))
        if re.fullmatch(r"[a-z]{2,3}", language) and language != DEFAULT_LANGUAGE:
            languages.add(language)
        for source in store.manifest.get("sources") or []:
            if named := re.match(r"hf:([\w.-]+/[\w.-]+)", str(source.get("path"))):
                datasets.add(named[1])
    found = {"language": sorted(languages), "datasets": sorted(datasets)}
    return {name: values for name, values in found.items() if values}


def corpus_text(store: TokenStore, share: float, scored: bool) -> str:
    """Return Markdown about one token store: sources, sizes and what was skipped."""
    manifest = store.manifest
    sources = [source_name(str(one.get("path"))) for one in manifest.get("sources") or []]
    names = ", ".join(f"`{name}`" for name in sources[:MAX_NAMES])
    more = f" and {len(sources) - MAX_NAMES:,} more" if len(sources) > MAX_NAMES else ""
    drawn = f" {share:.1%} of the examples were drawn from it." if share < 1 else ""
    said = (
        f"The training text has {store.documents:,} documents with {store.sentences:,} sentences "
        f"and {store.tokens:,} tokens, from {len(sources):,} file{'s' * (len(sources) != 1)}"
        f"{f' ({names}{more})' if names else ''}.{drawn}"
    )
    held_out = TokenStore(store.folder, "held_out").documents
    if held_out:
        said += f" {held_out:,} more documents were held out{' for the scores below' * scored}."
    skipped = (manifest.get("text") or {}).get("skipped") or {}
    return f"{said}\n\n{skipped_table(skipped)}"


def held_out_scores(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of an evaluation record that the hub knows: accuracies and perplexity."""
    kinds = ("accuracy", "perplexity")
    return {
        name: float(value)
        for name, value in evaluation.items()
        if name.endswith(kinds) and isinstance(value, float | int) and math.isfinite(value)
    }


def held_out_text(scores: Mapping[str, float], step: int, too_few: bool) -> str:
    """Return Markdown about the scores on the held-out documents."""
    if not scores and too_few:
        return "The model was not evaluated: fewer than two documents were held out."
    if not scores:
        return "The model was saved before its first evaluation."
    rows = [
        (name.replace("_", " "), f"{value:,.4g}" if "perplexity" in name else f"{value:.1%}")
        for name, value in scores.items()
    ]
    return f"On the held-out documents, after {step:,} updates:\n\n" + table(
        ("score", "value"), rows
    )
