"""The model card of a fine-tuned model: task, data, scores, settings and start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bertkit.checkpoints.card import (
    PIPELINES,
    Card,
    Scored,
    inherited_metadata,
    model_index,
    network_text,
    settings_table,
    skipped_table,
    source_name,
    start_text,
    table,
)
from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.finetuning.results import scores_text
from bertkit.finetuning.settings import RunSettings
from bertkit.tasks.data import TaskData
from bertkit.tasks.official import OFFICIAL
from bertkit.tasks.task import Task

HUB_SETS = {
    "squad-1.1": "rajpurkar/squad",
    "squad-2.0": "rajpurkar/squad_v2",
    "swag": "allenai/swag",
    "conll-2003": "eriktks/conll2003",
}
MAX_LABELS = 30
"""The maximum number of labels that a card lists."""


def tuned_card(
    data: TaskData,
    task: Task,
    start: PretrainedWeights,
    run: RunSettings,
    scores: Mapping[str, dict[str, float]],
    start_folder: Path,
) -> Card:
    """Return the card of a run's model, which has these scores on dev."""
    title, pipeline = f"BERT for {data.name}", PIPELINES[task.task_type]
    official = data.name in OFFICIAL
    hub_name = HUB_SETS.get(data.name, "nyu-mll/glue") if official else ""
    metadata = inherited_metadata(start_folder)
    metadata.pop("datasets", None)  # those that the start was trained on
    if hub_name:
        metadata["datasets"] = [hub_name]
    name = data.name if official else source_name(data.files.get("train", "")) or "own data"
    scored = [Scored(name, split, values, hub_name, "") for split, values in scores.items()]
    if index := model_index(title, pipeline, scored):
        metadata["model-index"] = index
    labels = list(task.labels[:MAX_LABELS]) if task.has_labels else []
    more = f" and {len(task.labels) - MAX_LABELS:,} more" if len(task.labels) > MAX_LABELS else ""
    listed = f" Its labels are {', '.join(labels)}{more}." if labels else ""
    summary = f"This is a BERT that was fine-tuned for {task.task_type}.{listed}"
    rows = [(split, scores_text(values, task.metric)) for split, values in scores.items()]
    files = ", ".join(f"{split}: {source_name(file)}" for split, file in data.files.items())
    settings = {**asdict(run), **task.settings()}
    return Card(
        title=title,
        summary=f"{summary}\n\n{network_text(start.config, start.tokenizer)}",
        metadata=metadata,
        sections={
            "Data": f"{files}\n\n{skipped_table(data.counts.skipped)}",
            "Scores": table(("split", "scores"), rows),
            "Settings": settings_table(settings),
            "Initial weights": start_text(start.path, start.digest),
        },
    )
