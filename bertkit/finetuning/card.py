"""The model card of a fine-tuned model: task, data, scores of the grid, settings and start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertkit.checkpoints.card import (
    Card,
    Scored,
    inherited_metadata,
    markdown_text,
    model_index,
    network_text,
    settings_table,
    skipped_table,
    source_name,
    start_text,
    table,
)
from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder
from bertkit.checkpoints.snippets import PIPELINES
from bertkit.config import as_json
from bertkit.datasets.benchmarks import OFFICIAL
from bertkit.datasets.glue import GLUE
from bertkit.finetuning.evaluation import Scorer, Scores
from bertkit.finetuning.grid import score_text, shown_scores
from bertkit.finetuning.settings import HeadSettings, RunSettings, TrainingSettings
from bertkit.tasks.data import describe_items
from bertkit.tasks.task import Items

HUB_SETS = {
    **{name: ("nyu-mll/glue", name.replace("-", "")) for name in GLUE},
    "squad-1.1": ("rajpurkar/squad", ""),
    "squad-2.0": ("rajpurkar/squad_v2", ""),
    "swag": ("allenai/swag", "regular"),
    "conll-2003": ("eriktks/conll2003", ""),
}
"""Official set -> its name on the hub and its configuration there."""
TASK_TEXTS = {
    "classification": "It assigns one of {count} labels to {input}",
    "multi-label-classification": "It assigns any of {count} labels to {input}",
    "regression": "It assigns a number to {input}",
    "multiple-choice": "It chooses the best of several continuations of a text",
    "token-classification": "It assigns one of {count} tags to every word of a text",
    "question-answering": "It finds the answer to a question in a text",
}
MAX_CARD_LABELS = 30
"""The maximum number of labels that a card lists."""


@dataclass(frozen=True, kw_only=True)
class TunedCards:
    """What the cards of all runs of a folder have in common."""

    start: PretrainedWeights
    scorer: Scorer
    train: Items
    training: TrainingSettings
    head: HeadSettings

    def card(
        self, run: RunSettings, scores: Scores, rows: Sequence[Mapping[str, Any]] = ()
    ) -> Card:
        """Return the card of one run's model, which has these scores.

        `rows` is the `grid_summary` of all runs, of which this is the best; () for a single run.
        """
        data, task = self.scorer.data, self.scorer.task
        pipeline = PIPELINES[task.task_type]
        title = f"BERT for {data.name}"
        hub_id, config = HUB_SETS.get(data.name, ("", ""))
        found = [
            Scored(
                self.dataset_name(split), hub_split(split, hub_id, config), values, hub_id, config
            )
            for split, values in scores.items()
        ]
        metadata = inherited_metadata(model_folder(self.start.path))
        metadata.pop("datasets", None)  # those that the start was trained on
        if hub_id:
            metadata["datasets"] = [hub_id]
        if index := model_index(title, pipeline, found):
            metadata["model-index"] = index
            metrics = [one["type"] for result in index[0]["results"] for one in result["metrics"]]
            metadata["metrics"] = list(dict.fromkeys(metrics))
        sections = {
            "Data": self.data_text(),
            "Scores": self.scores_text(run, scores, rows),
            "Settings": self.settings_text(run),
            "Initial weights": start_text(self.start.path, self.start.digest),
        }
        return Card(title=title, summary=self.summary(), metadata=metadata, sections=sections)

    def summary(self) -> str:
        """Describe the model in sentences."""
        data, task = self.scorer.data, self.scorer.task
        text = TASK_TEXTS[task.task_type].format(
            count=len(task.labels),
            input="an image with a text"
            if task.reads_images
            else "a pair of texts"
            if data.has_pairs
            else "a text",
        )
        on = f"on {data.name}" if data.name in OFFICIAL else f"for {task.task_type}"
        labels = [markdown_text(label) for label in task.labels[:MAX_CARD_LABELS]]
        labels += [f"{len(task.labels) - MAX_CARD_LABELS:,} more"] * (
            len(task.labels) > MAX_CARD_LABELS
        )
        named = f": {', '.join(labels)}" if "{count}" in TASK_TEXTS[task.task_type] else ""
        if task.task_type == "question-answering" and getattr(task, "null", False):
            text += ", or tells that the text has none"
        network = network_text(self.start.config, self.start.tokenizer)
        return f"This is a BERT that was fine-tuned {on}. {text}{named}.\n\n{network}"

    def dataset_name(self, split: str) -> str:
        """Return the name of a split's data set: official, or that of the user's file."""
        data = self.scorer.data
        if data.name in OFFICIAL:
            return data.name
        file = source_name(data.files.get(split, ""))
        return file if file and " of train" not in file else "own data"

    def data_text(self) -> str:
        """Return Markdown about the data: files, sizes, and what was skipped, cut or unknown."""
        data = self.scorer.data
        items = {"train": self.train, **self.scorer.items}
        names = {split: source_name(file) for split, file in data.files.items()}
        files = {n: f if " of train" in f else f"`{f}`" for n, f in names.items()}
        given = ", ".join(f"{name}: {file}" for name, file in files.items())
        lines = [f"- {describe_items(name, own)}" for name, own in items.items()]
        said = "\n".join(lines)
        where = f"The data are the official files of {data.name}." if data.name in OFFICIAL else ""
        where = where or f"The data are the user's own ({given})."
        return f"{where}\n\n{said}\n\n{skipped_table(data.counts.skipped)}"

    def scores_text(
        self, run: RunSettings, scores: Scores, rows: Sequence[Mapping[str, Any]]
    ) -> str:
        """Return Markdown with the scores of this model, and of all settings and seeds."""
        names = [("this model", split, values) for split, values in scores.items()]
        names += [
            ("input-independent baseline", split, values)
            for split, values in self.scorer.baselines.items()
        ]
        said = table(
            ("split", "", "scores"),
            [
                (split, who, shown_scores(values, self.scorer.metric))
                for who, split, values in names
            ],
        )
        if sum(row["runs"] for row in rows) < 2:
            return f"{said}\n\nThis is a single run, with the seed {run.seed}; it has no spread."
        split, metric = self.scorer.data.dev[0][0], self.scorer.metric
        spread = [(row["setting"], row["runs"], *spread_cells(row, split, metric)) for row in rows]
        header = ("setting", "runs", "median", "lowest", "highest", "deviation", "failed")
        return (
            f"{said}\n\nThis is the run with the best {metric} on {split} of "
            f"{sum(row['runs'] for row in rows):,}, so its own score there is optimistic. The "
            f"{metric} on {split} of every setting over its seeds:\n\n{table(header, spread)}"
        )

    def settings_text(self, run: RunSettings) -> str:
        """Return Markdown with the settings of the run, its task and its head."""
        own = {"precision": self.scorer.precision}
        head = {k: v for k, v in as_json(self.head).items() if k != "beside" and v}
        training = {**as_json(self.training), **own}
        task = self.scorer.task.settings()
        task.pop("threshold", None)  # each run chooses its own; bertkit.json has it
        return settings_table({**dataclasses.asdict(run), **training, **task, **head})


def hub_split(split: str, hub_id: str, config: str) -> str:
    """Return the hub's name of a split: its official sets call dev validation."""
    if config == "mnli" and split in ("dev", "test"):
        split = f"{split}-matched"
    return split.replace("dev", "validation").replace("-", "_") if hub_id else split


def spread_cells(row: Mapping[str, Any], split: str, metric: str) -> list[str]:
    """Return the cells about one setting: median, range, deviation, and runs that failed."""
    found = (row["scores"].get(split) or {}).get(metric) or {}
    kinds = ("median", "lowest", "highest", "deviation")
    values = [found.get(kind) for kind in kinds]
    cells = ["" if value is None else score_text(metric, value) for value in values]
    return [*cells, str(row["diverged"] + row["degenerate"])]
