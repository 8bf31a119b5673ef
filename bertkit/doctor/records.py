"""Read the records of a run directory, which may be finished, running, killed or damaged.

`recipe.json`, `journal.jsonl` and the folders next to them are read, and the run's token store is
located. Damage is recorded, not raised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import read_optional
from bertkit.pretraining_data.pairs import PAIR_OBJECTIVES, SPECIALS
from bertkit.training.journal import JOURNAL, numbered_records, read_journal

Record = dict[str, Any]

RECIPE = "recipe.json"
MIN_RECORDS = 6
"""The minimum number of journal lines for a phase to be judged by itself."""


def is_run(path: Path) -> bool:
    """Return whether a folder is a pre-training run, possibly one that has only just started."""
    return not is_tuning(path) and ((path / JOURNAL).is_file() or (path / RECIPE).is_file())


def is_tuning(path: Path) -> bool:
    """Return whether a folder is one run of a fine-tuning, which has a journal as well."""
    grid = path.resolve().parent.parent / "finetune.json"
    return (path / "run.json").is_file() or ((path / JOURNAL).is_file() and grid.is_file())


class RunRecords:
    """The records of a run directory; reading a damaged one does not fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damage: list[str] = []
        """One line for each file that cannot be read."""
        self.claims = self._object(folder / RECIPE)
        recipe = self.claims.get("recipe")
        self.recipe: Record = recipe if isinstance(recipe, dict) else {}
        records = self._records()
        self.records: dict[str, list[Record]] = {}
        for record in records:
            self.records.setdefault(str(record.get("kind")), []).append(record)
        self.steps = sorted(self.of("step"), key=record_step)
        self.evaluations = sorted(self.of("evaluation"), key=record_step)
        self.start: Record = (self.of("start") or [{}])[-1]
        self.last_step = max((record_step(record) for record in records), default=0)
        ended = bool(records) and records[-1].get("kind") == "end"
        self.end: str = str(records[-1].get("reason", "")) if ended else ""
        """The recorded reason for the end: finished, interrupted, diverged, or "" if none is."""
        self.in_progress = not self.end and is_locked(folder)
        self.store, self.stores = find_stores(self)
        named = {name for record in self.steps + self.evaluations for name in record}
        causal = "lm_loss" in named and "mlm_loss" not in named
        self.loss_prefix, self.loss_name = ("lm", "LM") if causal else ("mlm", "MLM")
        """The token objective, as the journal's fields name it and as messages show it."""
        self.pair_loss = "sop" if "sop_loss" in named else "nsp" if "nsp_loss" in named else ""
        """The pair objective as the journal's fields name it; "" if the run has none."""

    def _object(self, path: Path) -> Record:
        try:
            return read_optional(path, file_names=True)
        except BertkitError as error:
            self.damage.append(str(error))
            return {}

    def _records(self) -> list[Record]:
        path = self.folder / JOURNAL
        try:
            return read_journal(path) if path.exists() else []
        except BertkitError as error:
            self.damage.append(str(error))
            return readable(path)

    def of(self, kind: str) -> list[Record]:
        """Return all records of this `kind` in journal order."""
        return self.records.get(kind, [])

    def setting(self, table: str, name: str) -> float | None:
        """Return a number from a table of the recipe, or None if it is not recorded."""
        values = self.recipe.get(table)
        return finite_number(values, name) if isinstance(values, dict) else None

    def baseline(self, name: str) -> float | None:
        """Return a baseline that the journal records, or None."""
        values = self.start.get("baselines")
        return finite_number(values, name) if isinstance(values, dict) else None

    def majority_accuracy(self, phase: str) -> float | None:
        """Return the accuracy of always predicting a phase's more frequent pair label, or None.

        The journal records it for the training examples of the first phase in its start record,
        and for held-out examples, whose share of the label may differ.
        """
        training = self.baseline("nsp_majority")
        if phase == "0" and training is not None:
            return training
        own = [
            finite_number(r, "nsp_majority") for r in self.evaluations if record_phase(r) == phase
        ]
        known = [value for value in own if value is not None]
        return known[-1] if known else None

    @property
    def total_steps(self) -> int | None:
        """The number of updates of the whole recipe, or None if it is not recorded."""
        total = finite_number(self.start, "steps_total")
        if total is None:
            phases = self.recipe.get("phases")
            steps = phases.get("steps") if isinstance(phases, dict) else None
            numbers = steps if isinstance(steps, list) else []
            total = sum(value for value in numbers if isinstance(value, int)) or None
        return None if total is None else int(total)

    @property
    def finished(self) -> bool:
        """Whether all updates were made."""
        return self.end == "finished"

    @property
    def pair_objective(self) -> str:
        """How examples are cut, as in `pretraining_data.pairs.PAIR_OBJECTIVES`; nsp by default."""
        objectives = self.recipe.get("objectives")
        wanted = objectives.get("pair") if isinstance(objectives, dict) else None
        return wanted if wanted in PAIR_OBJECTIVES else "nsp"

    @property
    def specials(self) -> int:
        """The number of special tokens of an example."""
        return SPECIALS - (self.pair_objective == "single-segment")

    @property
    def store_names(self) -> list[str]:
        """The recorded folders of the corpus: one folder, or every folder of a mixture."""
        names = self.claims.get("stores")
        one = [self.claims.get("store") or self.folder / "store"]
        return [str(name) for name in (names if isinstance(names, list) else one)]

    @property
    def sequences(self) -> int:
        """The number of examples trained on so far."""
        return round(sum(finite_number(record, "sequences") or 0 for record in self.steps))

    @property
    def epochs(self) -> float | None:
        """How often the corpus was read, by tokens; random next sentences count as text read."""
        total = finite_number(self.start, "tokens_total")
        read = float(values(self.steps, "tokens").sum()) - self.specials * self.sequences
        return read / total if total else None

    def last_judgeable_phase(self) -> list[Record]:
        """Return the step records of the last phase that has enough of them, else of the last."""
        phases = self.phases()
        long = [records for records in phases if len(records) >= MIN_RECORDS]
        return [[], *phases, *long[-1:]][-1]

    def phases(self) -> list[list[Record]]:
        """Return the step records of each phase that has any; loss and speed differ by phase."""
        found: dict[str, list[Record]] = {}
        for record in self.steps:
            found.setdefault(record_phase(record), []).append(record)
        return list(found.values())


def readable(path: Path) -> list[Record]:
    """Return the intact records of a damaged journal."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    return [record for _, record in numbered_records(content) if record is not None]


def record_step(record: Record) -> int:
    """Return the number of updates made when a record was written."""
    return int(finite_number(record, "step") or 0)


def record_phase(record: Record) -> str:
    """Return the phase that a record belongs to, as a string that serves only as a key."""
    return str(record.get("phase", 0))


def finite_number(record: Record, name: str) -> float | None:
    """Return a field as a float if it is a finite number, else None."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def values(records: Sequence[Record], name: str) -> np.ndarray:
    """Return a field's finite numbers: (records that have it,) float64."""
    found = (finite_number(record, name) for record in records)
    return np.array([value for value in found if value is not None], dtype=np.float64)


def mean(records: Sequence[Record], name: str, per: str) -> float | None:
    """Return the mean of a field weighted by another, `per`, such as "targets"; None without any.

    A record in which `per` is missing or not above 0 has the weight 1.
    """
    pairs = [
        (value, max(0.0, finite_number(record, per) or 0.0) or 1.0)
        for record in records
        if (value := finite_number(record, name)) is not None
    ]
    if not pairs:
        return None
    found, weights = zip(*pairs, strict=True)
    with np.errstate(over="ignore"):  # absurd numbers of a damaged journal
        return float(np.average(found, weights=np.divide(weights, max(weights))))


def third_of(records: Sequence[Record], index: int) -> Sequence[Record]:
    """Return the first, second or last third (index 0, 1, 2) of some records, by count."""
    bounds = np.linspace(0, len(records), 4).round().astype(int)
    return records[bounds[index] : bounds[index + 1]]


def is_locked(folder: Path) -> bool:
    """Return whether a process holds a folder's lock (`files.exclusive_lock`); False if unknown."""
    try:
        import fcntl

        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


def find_stores(run: RunRecords) -> tuple[TokenStore | None, list[TokenStore]]:
    """Return the run's corpus, or None if it cannot be found, and those of its stores that can be.

    A mixture can only be rebuilt if all of its stores are found and its shares are recorded.
    """
    claims, names = run.claims, run.store_names
    if not isinstance(claims.get("stores"), list):
        store = find_store(run, names[0], claims.get("corpus"), run.folder / "store")
        return store, [] if store is None else [store]
    hashes, shares = claims.get("corpora"), claims.get("shares")
    known = (
        hashes if isinstance(hashes, list) and len(hashes) == len(names) else [None] * len(names)
    )
    found = [find_store(run, name, content) for name, content in zip(names, known, strict=True)]
    there = [store for store in found if store is not None]
    if len(there) < len(names) or not isinstance(shares, list):
        return None, there
    from bertkit.pretraining_data.mixture import mix_stores

    try:
        return mix_stores(there, weights=[float(share) for share in shares]), there
    except (BertkitError, TypeError, ValueError):  # different tokenizers, or damaged shares
        return None, there


def find_store(run: RunRecords, named: str, content: Any, *others: Path) -> TokenStore | None:
    """Find a store by its recorded path, relative to here or to a parent of the run; else None."""
    above = run.folder.resolve().parents
    places = [Path(named), *others, *(folder / named for folder in above)]
    stores = []
    for place in dict.fromkeys(path for path in places if is_there(path / "manifest.json")):
        try:
            stores.append(TokenStore(place))
        except BertkitError as error:
            run.damage.append(str(error))
    same = [store for store in stores if store.content_hash == content]
    return [*same, *stores, None][0]


def is_there(path: Path) -> bool:
    """Return whether a file exists; False if the folder's permissions hide it."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
