"""The paper's tables as lists of runs: which network is fine-tuned on which task with which head.

Tables 1 to 4 are from section 4 of the paper, tables 5 to 7 from sections 5.1 to 5.3, and table 8
and figure 5 from appendix C.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAPER: dict[str, Any] = tomllib.loads((HERE / "paper.toml").read_text(encoding="utf-8"))
"""Table -> title, section, remarks, columns, and the paper's rows."""
TABLES = tuple(PAPER)

Overrides = Mapping[str, Any]
"""Field of a pre-training recipe, such as "phases.steps" -> value."""
Size = tuple[int, int, int]
"""Layers, width, heads."""


@dataclass(frozen=True, kw_only=True)
class TaskScale:
    """How a task is fine-tuned; 0 stands for all rows, the model's maximum length and so on."""

    batch_size: int
    learning_rate: float
    epochs: int
    frozen_learning_rate: float = 0
    train: int = 0
    dev: int = 0
    max_length: int = 0
    stride: int = 0
    context: str = "sentence"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the tables are run with; see `scales.toml`."""

    name: str
    recipe: str
    vocabulary_size: int
    cased: bool
    seeds: int
    sizes: list[list[int]]
    plain_size: list[int]
    steps: list[int]
    units: int
    tasks: Mapping[str, Mapping[str, Any]]
    overrides: Overrides = field(default_factory=dict)
    per_seed: tuple[str, ...] = ()
    resized: Mapping[str, list[int]] = field(default_factory=dict)

    def task(self, name: str) -> TaskScale:
        """Return the settings of a task."""
        return TaskScale(**{**self.tasks["default"], **self.tasks.get(name, {})})


def read_scale(name: str) -> Scale:
    """Read a scale of `scales.toml`, or of a file FILE.toml that holds one such table."""
    if name.endswith(".toml"):
        [(name, values)] = tomllib.loads(Path(name).read_text(encoding="utf-8")).items()
        return Scale(name=name, **values)
    scales = tomllib.loads((HERE / "scales.toml").read_text(encoding="utf-8"))
    if name not in scales:
        raise SystemExit(f"error: there is no scale '{name}'; choose {', '.join(scales)}")
    return Scale(name=name, **scales[name])


@dataclass(frozen=True)
class Network:
    """A network to pre-train: the scale's recipe with some fields changed."""

    name: str
    overrides: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Run:
    """The fine-tuning of a network on a task."""

    network: Network
    task: str
    """The name of an official data set, or "perplexity": the network is only measured."""
    head: str = ""
    """"" for the task's linear layer; "bilstm" for a BiLSTM before it; or one of `features.LAYERS`:
    a BiLSTM on these layers of the frozen encoder."""
    step: int = 0
    """The number of pre-training updates after which the network is taken; 0 for the last."""

    @property
    def name(self) -> str:
        """The name of the run's results."""
        parts = (self.network.name, f"at-{self.step}" if self.step else "", self.task, self.head)
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Cell:
    """A number of a table: the median of a score of a run over its seeds."""

    row: str
    column: str
    run: Run
    split: str = "dev"
    metric: str = "accuracy"


PLAIN = Network("bert")
NO_NSP = Network("no-nsp", (("objectives.pair", "none"),))
LEFT_TO_RIGHT = Network("left-to-right", (("objectives.token", "clm"), ("objectives.pair", "none")))
METRICS = {"cola": "matthews", "sts-b": "spearman", "squad-1.1": "f1", "squad-2.0": "f1"}
"""Task -> the paper's metric, if it is not accuracy."""
LAYER_ROWS = {
    "Embeddings": "embeddings",
    "Second-to-last hidden": "second-to-last",
    "Last hidden": "last",
    "Weighted sum last four": "weighted-sum-last-four",
    "Concat last four": "concat-last-four",
    "Weighted sum all layers": "weighted-sum",
}
"""Row of table 7 -> layers that the BiLSTM reads."""


def sized(network: Network, size: Size) -> Network:
    """Return a network with another size; the plain one is named after the size alone."""
    layers, width, heads = size
    name = f"{layers}x{width}x{heads}"
    fields = (
        ("model.num_hidden_layers", layers),
        ("model.hidden_size", width),
        ("model.num_attention_heads", heads),
    )
    name = name if network == PLAIN else f"{network.name}-{name}"
    return Network(name, (*network.overrides, *fields))


def cell(row: str, column: str, network: Network, head: str = "", step: int = 0) -> Cell:
    """Return the cell of a column that is named after a task, with the paper's metric."""
    task = column.removesuffix(", exact match").removesuffix(", features")
    split = "dev-mismatched" if task == "mnli-mm" else "dev"
    task = "mnli" if task.startswith("mnli") else task
    metric = "f1" if task == "conll-2003" else METRICS.get(task, "accuracy")
    if column.endswith("exact match"):
        metric = "exact_match"
    return Cell(row, column, Run(network, task, head, step), split, metric)


def cells(table: str, scale: Scale) -> list[Cell]:
    """Return the cells of a table at a scale."""
    if table in LISTS:
        return LISTS[table](scale, PAPER[table]["columns"])
    plain_cells = [cell(f"here, {scale.name}", column, PLAIN) for column in PAPER[table]["columns"]]
    f1 = ("qqp", "mrpc") if table == "table-1" else ()  # the other tables report their accuracy
    return [replace(each, metric="f1") if each.column in f1 else each for each in plain_cells]


def table_network(table: str, scale: Scale, network: Network) -> Network:
    """Return a network in the size that the scale gives a table, if it does."""
    if table not in scale.resized:
        return network
    layers, width, heads = scale.resized[table]
    return sized(network, (layers, width, heads))


def ablation_cells(_: Scale, columns: list[str]) -> list[Cell]:
    """Return the cells of table 5: the pre-training tasks."""
    rows = {
        "BERT": (PLAIN, ""),
        "No NSP": (NO_NSP, ""),
        "LTR & No NSP": (LEFT_TO_RIGHT, ""),
        "LTR & No NSP + BiLSTM": (LEFT_TO_RIGHT, "bilstm"),
    }
    return [cell(row, column, *run) for row, run in rows.items() for column in columns]


def size_cells(scale: Scale, columns: list[str]) -> list[Cell]:
    """Return the cells of table 6: networks of several sizes."""
    cells = []
    for layers, width, heads in scale.sizes:
        row, plain = f"{layers} x {width}, {heads}", [layers, width, heads] == scale.plain_size
        network = PLAIN if plain else sized(PLAIN, (layers, width, heads))
        cells.append(Cell(row, "perplexity", Run(network, "perplexity"), metric="perplexity"))
        cells += [cell(row, column, network) for column in columns if column != "perplexity"]
    return cells


def layer_cells(scale: Scale, columns: list[str]) -> list[Cell]:
    """Return the cells of table 7: a network that is fine-tuned, and layers of a frozen one."""
    network = table_network("table-7", scale, PLAIN)
    rows = {"Fine-tuning": "", **LAYER_ROWS}
    return [cell(row, columns[0], network, layers) for row, layers in rows.items()]


def masking_cells(scale: Scale, columns: list[str]) -> list[Cell]:
    """Return the cells of table 8: shares of targets that are masked, kept and replaced."""
    cells = []
    for row in PAPER["table-8"]["rows"]:
        mask, keep, swap = (int(part) for part in row.split("/"))
        shares = (("masking.mask_share", mask / 100), ("masking.random_share", swap / 100))
        usual = (mask, keep, swap) == (80, 10, 10)
        network = PLAIN if usual else Network(f"mask-{mask}-{keep}-{swap}", shares)
        for column in columns:
            head = "concat-last-four" if column.endswith("features") else ""
            cells.append(cell(row, column, table_network("table-8", scale, network), head))
    return cells


def step_cells(scale: Scale, _: list[str]) -> list[Cell]:
    """Return the cells of figure 5: MNLI after different numbers of pre-training updates."""
    rows = {"Masked LM": PLAIN, "Left-to-right LM": LEFT_TO_RIGHT}
    return [
        Cell(row, f"{step / 1000:g}", Run(network, "mnli", step=step))
        for row, network in rows.items()
        for step in scale.steps
    ]


LISTS: dict[str, Callable[[Scale, list[str]], list[Cell]]] = {
    "table-5": ablation_cells,
    "table-6": size_cells,
    "table-7": layer_cells,
    "table-8": masking_cells,
    "figure-5": step_cells,
}
"""Table -> its cells; the other tables have one network on several tasks."""
