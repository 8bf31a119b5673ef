"""What is wrong with a pre-training run, finished, going on, killed or damaged.

What a run learns is judged in `learning.py`, its learning rate in `rates.py`; here are its state,
its files, its corpus, and its speed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bertkit.doctor.findings import Finding, judge_value, make_finding, pair_findings, percent
from bertkit.doctor.learning import check_overfitting, check_plateau, check_replaced
from bertkit.doctor.pairs import check_next_sentence
from bertkit.doctor.rates import check_rates, lower_rate_advice
from bertkit.doctor.records import RECIPE, RunRecords, finite_number, record_step, values
from bertkit.errors import BertkitError
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.journal import JOURNAL

FEWEST_LINES = 8
"""Of fewer journal lines in a phase speed is not judged."""


def check_run(run: RunRecords, store_findings: list[Finding]) -> list[Finding]:
    """All findings about a run.

    Args:
        run: its directory.
        store_findings: about its corpus, so that the advice can name causes.
    """
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
    findings += [check_evaluation(run), *check_examples(run), *check_epochs(run)]
    return [*findings, *check_speed(run)]


def check_state(run: RunRecords) -> Finding:
    """Finished, going on, or how it ended."""
    total = run.total_steps
    made = f"{run.last_step:,} of {total:,} updates" if total else f"{run.last_step:,} updates"
    numbers = {"updates": run.last_step, "of": total, "end": run.end}
    again = "run the same `bertkit pretrain` command to go on from the last checkpoint"
    if run.finished:
        whole = (run.folder / "model" / "model.safetensors").is_file()
        said = f"finished, {made}" + ("" if whole else ", but model/ holds no weights")
        return make_finding("state", "ok" if whole else "problem", numbers, said, again)
    if run.going_on:
        return make_finding("state", "ok", numbers, f"going on, {made}")
    if run.end == "diverged":
        said = f"diverged after {made}: loss or gradient was no number any more"
        change = f"the same command would diverge again: {lower_rate_advice(run)}"
        return make_finding("state", "problem", numbers, said, change)
    if run.end:
        return make_finding("state", "notice", numbers, f"{run.end} after {made}", again)
    if not run.steps:
        said = "begun, but no update has been written down"
        return make_finding("state", "notice", numbers, said, again)
    said = f"the journal breaks off after {made}: killed, out of memory or disk full"
    return make_finding("state", "notice", numbers, said, again)


def check_damage(run: RunRecords) -> list[Finding]:
    """Files that cannot be read, or are not there."""
    missing = [name for name in (RECIPE, JOURNAL) if not (run.folder / name).is_file()]
    damage = [*run.damage, *(f"{run.folder / name} does not exist" for name in missing)]
    lines = sum(len(records) for records in run.records.values())
    said = f"{len(damage)} damaged or missing, the first: {damage[0]}" if damage else ""
    return [
        make_finding(
            "journal",
            "problem" if damage else "ok",
            {"damaged": len(damage), "lines": lines},
            said or f"recipe and journal can be read ({lines:,} lines)",
            "restore the file, or begin a new run; what can be read is judged below",
        )
    ]


def check_tokenizers(run: RunRecords) -> list[Finding]:
    """Whether the run, its model and its corpus speak of the same pieces."""
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
    said = f"{', '.join(other)} with another tokenizer than {first}" if other else ""
    return [
        make_finding(
            "vocabulary",
            "problem" if other else "ok",
            {"different": len(other), "compared": list(hashes)},
            said or f"{', '.join(hashes)} have the same tokenizer",
            "ids mean other pieces there: prepare the text with the run's tokenizer, or begin a "
            "new run",
        )
    ]


def check_corpus(run: RunRecords) -> Finding:
    """Whether the corpus can be reached, and is the one the run was begun with."""
    if run.store is None:
        named = run.claims.get("store", "not recorded")
        said = f"the token store ({named}) is not within reach"
        if len(run.store_names) > 1:
            said = f"of the {named}, {len(run.stores)} are within reach: the corpus is not whole"
        advice = "run doctor where the store is, to have the corpus judged, too"
        return make_finding("corpus", "notice", {"reachable": False}, said, advice)
    same = run.claims.get("corpus") in (None, run.store.content_hash)
    said = f"{run.store.folder} is the corpus the run was begun with"
    return make_finding(
        "corpus",
        "ok" if same else "notice",
        {"reachable": True, "same": same, "store": str(run.store.folder)},
        said if same else f"{run.store.folder} holds other text than when the run was begun",
        "the run cannot go on with it, and what is said of the corpus below may not fit the run",
    )


def check_evaluation(run: RunRecords) -> Finding:
    """Whether the run is measured on held-out text."""
    every = run.setting("logging", "evaluate_every")
    due = run.finished or every is None or run.last_step >= every
    if run.evaluations:
        last = record_step(run.evaluations[-1])
        said = f"{len(run.evaluations):,} held-out measurements, the last at update {last:,}"
        return make_finding("evaluation", "ok", {"measurements": len(run.evaluations)}, said)
    if not due:
        said = f"the first held-out measurement comes at update {every:,.0f}"
        return make_finding("evaluation", "ok", {"measurements": 0}, said)
    return make_finding(
        "evaluation",
        "notice",
        {"measurements": 0},
        "no held-out measurement was made: only the training loss is known",
        "prepare the store with --held-out 0.01 or more (two documents at least), and keep "
        "logging.evaluate_every below phases.steps",
    )


def check_examples(run: RunRecords) -> list[Finding]:
    """Label balance and cut tokens, as `bertkit pretrain` announced them."""
    pairs = run.start.get("pairs")
    if not isinstance(pairs, dict):
        return []
    random_share, cut = finite_number(pairs, "random_share"), finite_number(pairs, "cut_share")
    if random_share is None or cut is None:
        return []
    count = finite_number(pairs, "examples")
    where = "the examples of the first window" if count is None else f"the first {count:,.0f} "
    where += "" if count is None else "examples"
    kind = {"nsp": "next", "sop": "order"}.get(run.pairs, "none")
    phases = run.start.get("phases")
    lengths = [finite_number(p, "length") or 0 for p in phases or () if isinstance(p, dict)]
    if not lengths or max(lengths) == lengths[0]:
        return pair_findings(random_share, cut, where, kind)
    measured = pair_findings(random_share, cut, f"{where} (of the first phase)", kind)
    milder = {"problem": "notice"}  # what the first phase lacks, a longer one may have
    return [replace(one, severity=milder.get(one.severity, one.severity)) for one in measured]


def check_epochs(run: RunRecords) -> list[Finding]:
    """How often the whole recipe reads the corpus."""
    if run.epochs is None or not run.total_steps or not run.last_step:
        return []
    planned = run.epochs / progress_share(run)
    said = f"the recipe reads the corpus {planned:.1f} times, {run.epochs:.1f} so far "
    said += "(the paper: about 40)"
    often, store = most_repeated_store(run)
    if store:
        said += f"; of the stores {store} most often, {often * planned:.1f} times"
    return [
        judge_value(
            "epochs",
            often * planned,
            {"planned": planned, "read": run.epochs, "most_read_store": often * planned},
            said,
            "give more text, or fewer phases.steps"
            + ("; of a small store a smaller share (--smoothing, --weights)" if store else ""),
        )
    ]


def progress_share(run: RunRecords) -> float:
    """The share of the recipe's tokens that was read, by lengths and batches of the phases."""
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
    """How many times as often as the corpus its most read store is read, and which; 1 of one."""
    members = run.start.get("mixture")
    rates = [
        (share / tokens, str(member.get("store")))
        for member in (members if isinstance(members, list) else [])
        if isinstance(member, dict)
        and (share := finite_number(member, "share"))
        and (tokens := finite_number(member, "token_share"))
    ]
    return max(rates, default=(1.0, ""))


def check_speed(run: RunRecords) -> list[Finding]:
    """Whether tokens per second fall, and how much of the machine is used."""
    rates, shares = values(run.present(), "tokens_per_second"), values(run.present(), "mfu")
    findings = []
    if len(rates) >= FEWEST_LINES:
        quarter = len(rates) // 4
        first, last = float(np.median(rates[:quarter])), float(np.median(rates[-quarter:]))
        kept = last / max(first, 1e-12)
        findings.append(
            judge_value(
                "throughput",
                kept,
                {"first": first, "last": last},
                f"{last:,.0f} tokens/s in the last quarter of the phase, {first:,.0f} in the first",
                "something else uses the machine, or it is throttled: look at its load and heat",
            )
        )
    if len(shares) >= FEWEST_LINES:
        median = float(np.median(shares))
        findings.append(
            judge_value(
                "matmul-share",
                median,
                {"mfu": median},
                f"{percent(median)} of the measured matrix-product peak (MFU)",
                "larger micro-batches (training.accumulate lower), --workers, or --compile on "
                "CUDA; networks this narrow cannot fill a GPU",
            )
        )
    return findings
