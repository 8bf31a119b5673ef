"""`diagnose`, and the checks of a pre-training run, finished, running, killed or damaged.

`learning.py` checks what a run learns and `rates.py` its learning rate; this module checks its
state, its files and its corpus.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bertkit.console import Console, console_or_new
from bertkit.doctor.corpus import check_store, is_store
from bertkit.doctor.findings import Finding, judge_value, make_finding, pair_findings
from bertkit.doctor.learning import (
    check_next_sentence,
    check_overfitting,
    check_plateau,
    check_replaced,
)
from bertkit.doctor.rates import check_rates, lower_rate_advice
from bertkit.doctor.records import RECIPE, RunRecords, finite_number, is_run, is_tuning, record_step
from bertkit.errors import BertkitError
from bertkit.files import from_home
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.journal import JOURNAL


def diagnose(
    path: Path | str, *, console: Console | None = None
) -> list[tuple[str, list[Finding]]]:
    """Find what is wrong with a pre-training run or a token store.

    Args:
        path: the folder of a run, finished or not, or of a token store.
        console: the console for progress; None for a new one.

    Returns:
        (title, findings) of a store, or of a run followed by those of its stores. Stores of the run
        that cannot be found are left out. Each `Finding` has a `severity` ("ok", "notice" or
        "problem"), its numbers, and advice.

    Raises:
        BertkitError: the folder is neither, or its records cannot be read.
    """
    path = Path(from_home(path))
    with console_or_new(console) as shown:
        if is_store(path):
            return [(f"token store {path}", check_store(path, shown))]
        if not is_run(path):
            raise BertkitError(
                f"{path} {describe_subject(path)}; name a pre-training run or a token store"
            )
        run = RunRecords(path)
        folders = dict.fromkeys(store.folder for store in run.stores)
        about = [(folder, check_store(folder, shown, run.pair_objective)) for folder in folders]
    in_stores = [finding for _, findings in about for finding in findings]
    parts = [(f"run {path}", check_run(run, in_stores))]
    return [*parts, *((f"its token store {folder}", findings) for folder, findings in about)]


def describe_subject(path: Path) -> str:
    """Return a phrase that says what a path is, if it is neither a run nor a store."""
    if not path.exists():
        return "does not exist"
    if path.is_file():
        return "is a file, not the folder of a run or store"
    if is_tuning(path):
        return "is one run of a fine-tuning (see `bertkit report`)"
    kinds = {
        "finetune.json": "is a fine-tuning (see `bertkit report`)",
        "model.safetensors": "is a model directory",
        "vocab.txt": "is a tokenizer",
    }
    for name, kind in kinds.items():
        if (path / name).is_file():
            return kind
    return "holds no journal.jsonl, recipe.json or manifest.json"


def check_run(run: RunRecords, store_findings: list[Finding]) -> list[Finding]:
    """Return all findings about a run."""
    findings = [check_state(run), *check_damage(run), *check_tokenizers(run), check_corpus(run)]
    if not run.steps:
        return findings
    rates = check_rates(run)
    everything = [*findings, *rates, *store_findings]
    causes = list(dict.fromkeys(one.name for one in everything if one.severity == "problem"))
    findings += check_plateau(run, causes)
    findings += rates
    findings += check_next_sentence(run)
    findings += check_replaced(run)
    findings += check_overfitting(run)
    return [*findings, check_evaluation(run), *check_examples(run), *check_epochs(run)]


def check_state(run: RunRecords) -> Finding:
    """Report whether the run is finished or still running, or how it ended."""
    total = run.total_steps
    made = f"{run.last_step:,} of {total:,} updates" if total else f"{run.last_step:,} updates"
    numbers = {"updates": run.last_step, "of": total, "end": run.end}
    again = "run the same `bertkit pretrain` command again to resume from the last checkpoint"
    if run.finished:
        whole = (run.folder / "model" / "model.safetensors").is_file()
        said = f"finished, {made}" + ("" if whole else ", but model/ has no weights")
        return make_finding("state", "ok" if whole else "problem", numbers, said, again)
    if run.in_progress:
        return make_finding("state", "ok", numbers, f"still running, {made}")
    if run.end == "diverged":
        said = f"diverged after {made}: loss or gradient became NaN or infinite"
        change = f"the same command would diverge again: {lower_rate_advice(run)}"
        return make_finding("state", "problem", numbers, said, change)
    if run.end:
        return make_finding("state", "notice", numbers, f"{run.end} after {made}", again)
    said = f"the journal breaks off after {made}: the run was killed, or memory or disk ran out"
    if not run.steps:
        said = "started, but no update has been recorded"
        if (run.folder / "model" / "model.safetensors").is_file():
            said = "model/ is there, but the journal has no update: lines of it are lost"
            return make_finding("state", "problem", numbers, said, "restore journal.jsonl")
    return make_finding("state", "notice", numbers, said, again)


def check_damage(run: RunRecords) -> list[Finding]:
    """Check for files that are missing or cannot be read."""
    missing = [name for name in (RECIPE, JOURNAL) if not (run.folder / name).is_file()]
    damage = [*run.damage, *(f"{run.folder / name} does not exist" for name in missing)]
    lines = sum(len(records) for records in run.records.values())
    said = f"damaged or missing files: {len(damage)}; the first: {damage[0]}" if damage else ""
    return [
        make_finding(
            "journal",
            "problem" if damage else "ok",
            {"damaged": len(damage), "lines": lines},
            said or f"recipe and journal can be read ({lines:,} lines)",
            "restore the files, or start a new run; the findings below cover what can be read",
        )
    ]


def check_tokenizers(run: RunRecords) -> list[Finding]:
    """Check that the run, its model and its corpus use the same tokenizer."""
    hashes = {}
    if isinstance(run.claims.get("tokenizer_hash"), str):
        hashes["recipe.json"] = run.claims["tokenizer_hash"]
    for store in run.stores:
        name = "the store" if len(run.store_names) == 1 else f"store {store.folder}"
        hashes[name] = store.tokenizer_hash
    for name in ("tokenizer", "model"):
        folder = run.folder / name
        if (folder / "vocab.txt").is_file():
            try:
                hashes[f"{name}/"] = Tokenizer.load(folder).content_hash
            except BertkitError as error:
                hashes[f"{name}/"] = f"damaged ({error})"
    if len(hashes) < 2:
        return []
    first = next(iter(hashes))
    other = [name for name, value in hashes.items() if value != hashes[first]]
    said = f"{', '.join(other)} with a tokenizer that differs from {first}" if other else ""
    return [
        make_finding(
            "vocabulary",
            "problem" if other else "ok",
            {"different": len(other), "compared": list(hashes)},
            said or f"{', '.join(hashes)} have the same tokenizer",
            "the same ids stand for different tokens: prepare the text with the run's tokenizer, "
            "or start a new run",
        )
    ]


def check_corpus(run: RunRecords) -> Finding:
    """Check that the corpus can be found, and is the one with which the run was started."""
    if run.store is None:
        named = run.claims.get("store", "not recorded")
        said = f"the token store ({named}) cannot be found"
        if len(run.store_names) > 1:
            said = f"of the {named}, {len(run.stores)} can be found: the corpus is incomplete"
        advice = "run `bertkit doctor` where all stores are, so that the corpus is checked, too"
        return make_finding("corpus", "notice", {"reachable": False}, said, advice)
    same = run.claims.get("corpus") in (None, run.store.content_hash)
    said = f"{run.store.folder} is the corpus with which the run was started"
    return make_finding(
        "corpus",
        "ok" if same else "notice",
        {"reachable": True, "same": same, "store": str(run.store.folder)},
        said if same else f"{run.store.folder} has changed since the run was started",
        "restore the original store to resume the run; the findings about the corpus below may "
        "not apply to this run",
    )


def check_evaluation(run: RunRecords) -> Finding:
    """Check that the run is evaluated on held-out text."""
    every = run.setting("logging", "evaluate_every")
    due = run.finished or every is None or run.last_step >= every
    if run.evaluations:
        last = record_step(run.evaluations[-1])
        said = f"{len(run.evaluations):,} held-out evaluations, the last at update {last:,}"
        return make_finding("evaluation", "ok", {"measurements": len(run.evaluations)}, said)
    if not due:
        said = f"the first held-out evaluation is due at update {every:,.0f}"
        return make_finding("evaluation", "ok", {"measurements": 0}, said)
    return make_finding(
        "evaluation",
        "notice",
        {"measurements": 0},
        "no held-out evaluation was made: only the training loss is known",
        "prepare the store with --held-out 0.01 or more (at least two documents), and keep "
        "logging.evaluate_every below phases.steps",
    )


def check_examples(run: RunRecords) -> list[Finding]:
    """Report label balance and truncated tokens from the statistics in the start record."""
    pairs = run.start.get("pairs")
    if not isinstance(pairs, dict):
        return []
    random_share, cut = finite_number(pairs, "random_share"), finite_number(pairs, "cut_share")
    if random_share is None or cut is None:
        return []
    count = finite_number(pairs, "examples")
    where = "the examples of the first window" if count is None else f"the first {count:,.0f} "
    where += "" if count is None else "examples"
    kind = run.pair_loss or "none"
    phases = run.start.get("phases")
    lengths = [finite_number(p, "length") or 0 for p in phases or () if isinstance(p, dict)]
    if not lengths or max(lengths) == lengths[0]:
        return pair_findings(random_share, cut, where, kind)
    measured = pair_findings(random_share, cut, f"{where} (of the first phase)", kind)
    milder = {"problem": "notice"}  # a later phase with longer examples may be better
    return [replace(one, severity=milder.get(one.severity, one.severity)) for one in measured]


def check_epochs(run: RunRecords) -> list[Finding]:
    """Check how often the whole recipe reads the corpus."""
    if run.epochs is None or not run.total_steps or not run.last_step:
        return []
    planned = run.epochs / progress_share(run)
    said = f"the recipe reads the corpus {planned:.1f} times, {run.epochs:.1f} so far "
    said += "(the paper: about 40)"
    often, store = most_repeated_store(run)
    if store:
        said += f"; the most repeated store, {store}, is read {often * planned:.1f} times"
    return [
        judge_value(
            "epochs",
            often * planned,
            {"planned": planned, "read": run.epochs, "most_read_store": often * planned},
            said,
            "add more text, or lower phases.steps"
            + ("; give small stores a smaller share (--smoothing, --weights)" if store else ""),
        )
    ]


def progress_share(run: RunRecords) -> float:
    """Return the share of the recipe's tokens read so far, by the phases' lengths and batches."""
    assert run.total_steps is not None
    phases, left = run.start.get("phases"), float(run.last_step)
    done = everything = 0.0
    for phase in phases if isinstance(phases, list) else []:
        steps, length, size = (
            finite_number(phase, name) or 0.0 if isinstance(phase, dict) else 0.0
            for name in ("steps", "length", "batch_size")
        )
        done += min(left, steps) * length * size
        everything += steps * length * size
        left -= min(left, steps)
    if 0 < done <= everything:
        return done / everything
    return min(1.0, run.last_step / run.total_steps)


def most_repeated_store(run: RunRecords) -> tuple[float, str]:
    """Return how many times as often as the corpus its most repeated store is read, and its name.

    Without a mixture that is (1.0, "").
    """
    members = run.start.get("mixture")
    rates = [
        (share / tokens, str(member.get("store")))
        for member in (members if isinstance(members, list) else [])
        if isinstance(member, dict)
        and (share := finite_number(member, "share"))
        and (tokens := finite_number(member, "token_share"))
    ]
    return max(rates, default=(1.0, ""))
