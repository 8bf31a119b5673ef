"""The command `bertkit evaluate`: of fine-tuned models, on minimal pairs, and of retrieval."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.console
from cyclopts import App
from rich.markup import escape
from rich.table import Table

import bertkit
from bertkit.cli.options import (
    NO_COLUMNS,
    ColumnFlags,
    Device,
    NullThreshold,
    Precision,
    PretrainedModel,
    TunedModel,
    given,
)
from bertkit.config import flag_group
from bertkit.console import Console
from bertkit.errors import BertkitError
from bertkit.outputs import DATA, RESULTS, TEXT

if TYPE_CHECKING:
    from bertkit.predict.minimal_pairs import MinimalPairEvaluation


def evaluate_command(
    model: TunedModel,
    file: Annotated[str, TEXT] = "",
    *,
    data: Annotated[Path | None, DATA] = None,
    split: str = "dev",
    task: str = "",
    ensemble: tuple[Path, ...] = (),
    out: Annotated[Path | None, RESULTS] = None,
    precision: Precision = "auto",
    bound: float | None = None,
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
) -> None:
    """Score a fine-tuned model on a file or an official data set, or predict for its server.

    Parameters
    ----------
    file
        Your labelled data; its columns are those that the model was fine-tuned with.
    data
        The folder of an official data set, of which --split is read.
    split
        dev, test, or another split of the set, such as dev-mismatched; a file read as test may lack
        labels.
    task
        The official data set, if it is not the one that the model was fine-tuned on.
    ensemble
        More models of the same task; the outputs of all are averaged.
    out
        The folder for predictions, official files, scores, and a record of the evaluation.
    precision
        fp32, bf16, int8 (CPUs only), or auto: bf16 if the device computes it fast. With int8, the
        scores of fp32 are shown too.
    bound
        The maximum drop of the main score below that of fp32, in percentage points; a larger drop
        is an error.
    """
    from bertkit.finetuning.grid import shown_scores
    from bertkit.predict.evaluate import check_change

    if bound is not None and not math.isfinite(bound):
        raise BertkitError(f"--bound must be a finite number, not {bound}", code="number")
    with Console() as console:
        found = bertkit.evaluate(
            [model, *ensemble],
            file or None,
            task=task,
            data=data,
            split=split,
            columns=given(columns),
            precision=precision,
            compare_fp32=bound is not None,
            unlabelled_ok=out is not None,
            null_threshold=null_threshold,
            device=device,
            console=console,
        )
        for scores, how in ((found.scores, ""), (found.exact_scores, " in fp32")):
            if scores:
                print(f"{found.done.name} {split}{how}: {shown_scores(scores)}")  # noqa: T201
        if bound is not None:
            precision = found.predictor.precision
            check_change(found.metric, found.exact_scores, found.scores, bound / 100, precision)
        if out is not None:
            written = found.save(out, [model, *ensemble])
            console.say(f"{split} predictions: {', '.join(map(str, written))}")


def minimal_pairs_command(
    model: PretrainedModel,
    data: Annotated[str, TEXT],
    *,
    split: str = "all",
    method: str = "auto",
    good: str = "sentence_good",
    bad: str = "sentence_bad",
    out: Annotated[Path | None, RESULTS] = None,
    precision: Precision = "fp32",
    device: Device = "auto",
) -> None:
    """Measure how often a pre-trained model prefers the acceptable sentence of a minimal pair.

    Sentences are compared by their pseudo-log-likelihood, or, if the model reads in one direction,
    by its likelihood; equal scores count half. The accuracy is the mean over the sets of the data.

    Parameters
    ----------
    data
        The folder of BLiMP; a file, folder or glob with a column for each sentence; or plain text
        whose lines alternate: an acceptable sentence, then its unacceptable counterpart.
    split
        all; of BLiMP also dev, the tenth of its sets on which you may choose recipes, or test, the
        others.
    method
        within-word-l2r, pll, causal, or auto: within-word-l2r for a masked language model, causal
        for a model that reads in one direction.
    good
        The column of the acceptable sentence.
    bad
        The column of the unacceptable sentence.
    out
        The folder for a record of the evaluation and the scores of every pair.
    """
    with Console() as console:
        found = bertkit.evaluate_minimal_pairs(
            model,
            data,
            method=method,
            split=split,
            good=good,
            bad=bad,
            precision=precision,
            device=device,
            console=console,
        )
        rich.console.Console().print(accuracy_table(found))
        if out is not None:
            console.say(f"scores: {', '.join(map(str, found.save(out)))}")


def retrieval_command(
    model: Path,
    file: Annotated[str, TEXT],
    *,
    candidates: int = 1000,
    out: Annotated[Path | None, RESULTS] = None,
    precision: Precision = "auto",
    device: Device = "auto",
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
) -> None:
    """Measure how often a model of images and texts finds the image of a text, and the reverse.

    Parameters
    ----------
    model
        A model fine-tuned with --image-task alignment or pretraining.
    file
        Rows of a text and its image; rows with the same image are texts of one image.
    candidates
        The maximum number of rows that are compared with each other; more rows are divided into
        groups of adjacent rows.
    out
        The folder for a record of the evaluation and the rank of every text's image.
    """
    with Console() as console:
        found = bertkit.evaluate_retrieval(
            model,
            file,
            columns=given(columns),
            candidates=candidates,
            precision=precision,
            device=device,
            console=console,
        )
        table = Table("recall", *[f"at {k}" for k in found.chance])
        for name, values in (
            ("of a text's image", found.image_recall),
            ("of an image's text", found.text_recall),
            ("of images by chance", found.chance),
        ):
            table.add_row(name, *[f"{value:.1%}" for value in values.values()])
        rich.console.Console().print(table)
        if out is not None:
            console.say(f"ranks: {', '.join(map(str, found.save(out)))}")


def accuracy_table(found: MinimalPairEvaluation) -> Table:
    """Return the accuracy by set, by field and overall as a table."""
    ties = any(one.ties for one in found.sets.values())
    table = Table("set", "field", "pairs", *["ties"] * ties, "accuracy")
    for name, one in sorted(found.sets.items(), key=lambda item: (item[1].field, item[0])):
        counts = [f"{one.pairs:,}", *[f"{one.ties:,}"] * ties]
        table.add_row(escape(name), escape(one.field), *counts, f"{one.accuracy:.1%}")
    table.add_section()
    blank = [""] * (1 + ties)
    for field, accuracy in sorted(found.fields.items()):
        table.add_row(f"mean of {escape(field)}", "", *blank, f"{accuracy:.1%}")
    title = f"mean of all sets ({found.method}, {found.precision})"
    table.add_row(title, "", *blank, f"{found.accuracy:.1%}")
    return table


evaluate_application = App(name="evaluate", default_command=evaluate_command)
evaluate_application.command(minimal_pairs_command, name="minimal-pairs")
evaluate_application.command(retrieval_command, name="retrieval")
