"""What to run for each table: the networks to pre-train and the tasks to fine-tune them on.

Tables 1 to 4 are from section 4 of the paper, tables 5 to 7 from sections 5.1 to 5.3, and table 8
and figure 5 from appendix C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from bertkit.config import read_recipe
from bertkit.finetuning.settings import HeadSettings
from bertkit.reproduce.paper import PaperTable, Scale, Size, paper_tables
from bertkit.training.recipe import PretrainRecipe

PLAIN = HeadSettings()
BASE = "bert"
SNAPSHOTS = (BASE, "left-to-right")
"""Networks whose intermediate models are kept for figure 5, whichever table they are made for."""
RESIZED = ("table-7", "table-8")
"""The tables whose networks a scale may give a size of their own (`Scale.bases`)."""
LEFT_TO_RIGHT = ("--objectives.token", "clm", "--objectives.pair", "none")
RIGHT_TO_LEFT = ("--objectives.token", "clm-reversed", "--objectives.pair", "none")
NO_NSP = ("--objectives.pair", "none")
PERPLEXITY = "perplexity"
METRICS = {
    "squad-1.1": "f1",
    "squad-2.0": "f1",
    "sts-b": "spearman",
    "cola": "matthews",
    "conll-2003": "f1",
}
"""Task -> the paper's metric, if it is not accuracy."""

LAYER_ROWS = {
    "Embeddings": "embeddings",
    "Second-to-last hidden": "second-to-last",
    "Last hidden": "last",
    "Weighted sum last four": "weighted-sum-last-four",
    "Concat last four": "concat-last-four",
    "Weighted sum all layers": "weighted-sum",
}
"""Row of table 7 -> the value of `HeadSettings.layers`."""


class TaskRun(NamedTuple):
    """The fine-tuning of a network on a task."""

    variant: str
    """The name of the pre-trained network."""
    at: int
    """The number of pre-training updates after which it is taken; 0 for the finished network."""
    task: str
    head: HeadSettings = PLAIN
    seed: int = 0
    """The only seed that is run, if each seed has a network of its own; 0 for all seeds."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        parts = [f"at-{self.at}", self.task] if self.at else [self.task]
        if self.head.frozen:
            parts.append(f"frozen-{self.head.layers}")
        if self.head.head != "linear":
            parts.append(self.head.head)
        if self.head.beside:
            parts.append("beside")
        if self.seed:
            parts.append(f"seed-{self.seed}")
        return f"{self.variant}/{'-'.join(parts)}"


class Cell(NamedTuple):
    """One number of a table."""

    row: str
    column: str
    """The paper's column, even if another task stands in."""
    jobs: tuple[TaskRun, ...]
    """One job with all seeds, or one for each seed; see `split_seeds`."""
    metric: str
    stands_in: bool = False
    """Whether a stand-in task replaces the task of the column."""
    thousands: str = ""
    """In figure 5, the updates in thousands, which is the name of the paper's column; else ""."""


@dataclass(frozen=True)
class Experiment:
    """A table of the paper, with its cells and the networks that they need."""

    paper: PaperTable
    cells: tuple[Cell, ...]
    variants: Mapping[str, tuple[str, ...]]
    """Network -> the flags of its pre-training recipe."""

    @property
    def jobs(self) -> list[TaskRun]:
        """The distinct fine-tuning jobs of the table."""
        tuned = [cell for cell in self.cells if cell.metric != PERPLEXITY]
        return list(dict.fromkeys(job for cell in tuned for job in cell.jobs))

    @property
    def rows(self) -> list[str]:
        """The names of the rows, in order."""
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        return list(dict.fromkeys(cell.column for cell in self.cells))


def seed_name(variant: str, seed: int, scale: Scale) -> str:
    """Return the name of the network of a seed: the variant's own if all seeds share one."""
    return f"{variant}-seed-{seed}" if variant in scale.repeated else variant


def variant_of(network: str) -> str:
    """Return the variant that a network belongs to; see `seed_name`."""
    return network.partition("-seed-")[0]


def split_seeds(job: TaskRun, scale: Scale) -> tuple[TaskRun, ...]:
    """Return a job for each seed if one of its networks is pre-trained for each, else the job."""
    if not {job.variant, job.head.beside} & set(scale.repeated):
        return (job,)

    def with_seed(seed: int) -> TaskRun:
        beside = seed_name(job.head.beside, seed, scale)
        variant, head = seed_name(job.variant, seed, scale), replace(job.head, beside=beside)
        return job._replace(variant=variant, head=head, seed=seed)

    return tuple(with_seed(seed) for seed in range(1, scale.seeds + 1))


def size_flags(size: Size) -> tuple[str, ...]:
    """Return the flags that give a network a size."""
    names = ("num-hidden-layers", "hidden-size", "num-attention-heads")
    words = ((f"--model.{name}", str(value)) for name, value in zip(names, size, strict=True))
    return tuple(word for pair in words for word in pair)


def size_name(size: Size) -> str:
    """Return the name of a network that differs from the scale's by its size alone."""
    return "x".join(map(str, size))


def resized(variant: str, key: str, scale: Scale) -> str:
    """Return the name that a variant has in a table; see `Scale.bases`."""
    if not variant or key not in scale.bases:
        return variant
    size = size_name(scale.bases[key])
    return size if variant == BASE else f"{variant}-{size}"


def table_networks(
    key: str, variants: Mapping[str, tuple[str, ...]], scale: Scale
) -> dict[str, tuple[str, ...]]:
    """Return the networks of a table with their flags: of its size, and of all seeds."""
    size = size_flags(scale.bases[key]) if key in scale.bases else ()
    networks = {}
    for variant, flags in variants.items():
        name, own = resized(variant, key, scale), (*flags, *size)
        if name not in scale.repeated:
            networks[name] = own
            continue
        for seed in range(1, scale.seeds + 1):
            networks[seed_name(name, seed, scale)] = (*own, "--training.seed", str(seed))
    return networks


def column_task(column: str) -> tuple[str, str]:
    """Return the task and the metric of a column of the paper."""
    if column.endswith(", exact match"):
        return column.removesuffix(", exact match"), "exact_match"
    task = "mnli" if column in ("mnli-m", "mnli-mm") else column.removesuffix(", features")
    return task, METRICS.get(task, "accuracy")


def table_cell(
    table: str,
    row: str,
    column: str,
    variant: str,
    scale: Scale,
    head: HeadSettings = PLAIN,
    at: int = 0,
) -> Cell:
    """Return a cell, using the scale's stand-in for the column's task if it has one."""
    task, metric = column_task(column)
    stand_in = scale.stand_ins.get(table, {}).get(column)
    if stand_in:
        task, metric = stand_in, METRICS.get(stand_in, "accuracy")
    if column == "mnli-mm" and not stand_in:
        metric = f"dev-mismatched {metric}"
    head = replace(head, beside=resized(head.beside, table, scale))
    jobs = split_seeds(TaskRun(resized(variant, table, scale), at, task, head), scale)
    return Cell(row, column, jobs, metric, bool(stand_in))


def plain_table(key: str, scale: Scale) -> Experiment:
    """Return one of the tables 1 to 4: one network on the tasks of the columns."""
    paper, row = paper_tables()[key], f"bertkit, {scale.name}"
    cells = [table_cell(key, row, column, BASE, scale) for column in paper.columns]
    f1 = {"qqp", "mrpc"} if key == "table-1" else set()
    cells = [c._replace(metric="f1") if c.column in f1 and not c.stands_in else c for c in cells]
    return Experiment(paper, tuple(cells), table_networks(key, {BASE: ()}, scale))


def table_5(scale: Scale) -> Experiment:
    """Return table 5: the effect of the pre-training tasks."""
    paper = paper_tables()["table-5"]
    rows = {
        "BERT": (BASE, PLAIN),
        "No NSP": ("no-nsp", PLAIN),
        "LTR & No NSP": ("left-to-right", PLAIN),
        "LTR & No NSP + BiLSTM": ("left-to-right", HeadSettings(head="bilstm")),
    }
    cells = [
        table_cell("table-5", row, column, variant, scale, head)
        for row, (variant, head) in rows.items()
        for column in paper.columns
    ]
    variants = {BASE: (), "no-nsp": NO_NSP, "left-to-right": LEFT_TO_RIGHT}
    return Experiment(paper, tuple(cells), table_networks("table-5", variants, scale))


def table_6(scale: Scale) -> Experiment:
    """Return table 6: the model sizes, smallest first."""
    paper, cells = paper_tables()["table-6"], []
    variants: dict[str, tuple[str, ...]] = {}
    own = read_recipe(PretrainRecipe, scale.recipe, scale.recipe_flags(())).model
    own_size = (own.num_hidden_layers, own.hidden_size, own.num_attention_heads)

    def parameters(size: Size) -> int:
        return 12 * size[0] * size[1] ** 2 + scale.vocabulary_size * size[1]  # approximate

    for layers, width, heads in sorted(scale.sizes, key=parameters):
        variant, row = size_name((layers, width, heads)), f"{layers} x {width}, {heads}"
        if (layers, width, heads) == own_size:
            variant, variants[BASE] = BASE, ()
        else:
            variants[variant] = size_flags((layers, width, heads))
        jobs = split_seeds(TaskRun(variant, 0, ""), scale)
        cells.append(Cell(row, PERPLEXITY, jobs, PERPLEXITY))
        cells += [
            table_cell("table-6", row, column, variant, scale)
            for column in paper.columns
            if column != PERPLEXITY
        ]
    return Experiment(paper, tuple(cells), table_networks("table-6", variants, scale))


def feature_head(scale: Scale, layers: str = "concat-last-four", beside: str = "") -> HeadSettings:
    """Return a BiLSTM on the features of a frozen encoder (section 5.3)."""
    return HeadSettings(frozen=True, layers=layers, head="bilstm", units=scale.units, beside=beside)


def table_7(scale: Scale) -> Experiment:
    """Return table 7: named entities with a fine-tuned and with a frozen encoder."""
    key = "table-7"
    cells = [table_cell(key, "Fine-tuning", "conll-2003", BASE, scale)]
    for row, layers in LAYER_ROWS.items():
        head = feature_head(scale, layers)
        cells.append(table_cell(key, row, "conll-2003", BASE, scale, head))
    elmo = feature_head(scale, beside="right-to-left")
    cells.append(table_cell(key, "LTR + RTL", "conll-2003", "left-to-right", scale, elmo))
    variants = {BASE: (), "left-to-right": LEFT_TO_RIGHT, "right-to-left": RIGHT_TO_LEFT}
    return Experiment(paper_tables()[key], tuple(cells), table_networks(key, variants, scale))


def table_8(scale: Scale) -> Experiment:
    """Return table 8: different shares of masked, kept and replaced targets."""
    key = "table-8"
    paper, cells, variants = paper_tables()[key], [], {}
    for row in paper.rows:
        mask, keep, swap = (int(part) for part in row.split("/"))
        variant = BASE if (mask, keep, swap) == (80, 10, 10) else f"mask-{mask}-{keep}-{swap}"
        shares = f"--masking.mask-share {mask / 100} --masking.random-share {swap / 100}"
        variants[variant] = () if variant == BASE else tuple(shares.split())
        for column in paper.columns:
            head = feature_head(scale) if column.endswith("features") else PLAIN
            cells.append(table_cell(key, row, column, variant, scale, head))
    return Experiment(paper, tuple(cells), table_networks(key, variants, scale))


def figure_5(scale: Scale) -> Experiment:
    """Return figure 5: the score after different numbers of pre-training steps."""
    variants = {BASE: (), "left-to-right": LEFT_TO_RIGHT}
    cells = []
    for row, variant in (("Masked LM", BASE), ("Left-to-right LM", "left-to-right")):
        for step in scale.steps:
            found = table_cell("figure-5", row, "mnli-m", variant, scale, at=step)
            cells.append(found._replace(column=f"{step:,}", thousands=f"{step / 1000:g}"))
    return Experiment(
        paper_tables()["figure-5"], tuple(cells), table_networks("figure-5", variants, scale)
    )


EXPERIMENTS: dict[str, Callable[[Scale], Experiment]] = {
    **{key: partial(plain_table, key) for key in ("table-1", "table-2", "table-3", "table-4")},
    "table-5": table_5,
    "table-6": table_6,
    "table-7": table_7,
    "table-8": table_8,
    "figure-5": figure_5,
}
