"""One run: the compact embeddings change nothing, the seed decides everything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bertkit.datasets.examples import TextExample
from bertkit.finetuning.run import train_task

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.console import Console
from bertkit.errors import BertkitError
from bertkit.finetuning import run as tune_module
from bertkit.finetuning.settings import RunSettings, TrainingSettings
from bertkit.tasks.classification import Classification
from bertkit.training.journal import Journal, RunLog, read_journal

TASK = Classification(("no", "yes"), max_length=40)
INPUTS = [
    TextExample("0", "river stone bridge", None, "yes", "a:1"),
    TextExample("1", "lantern.", "harvest winter", "no", "a:2"),
    TextExample("2", "walking singing " * 30, None, "yes", "a:3"),
    TextExample("3", "letter sailor", "mountain window", "no", "a:4"),
    TextExample("4", "river", None, "yes", "a:5"),
]
RUN = RunSettings(batch_size=2, learning_rate=3e-3, epochs=2, seed=3)


class Whole:
    """Stands for `CompactEmbeddings` and leaves the embeddings whole."""

    table = None

    def __init__(self, encoder: Any, items: Any) -> None:
        """Leave it."""

    def restore(self, shrinkage: float) -> None:
        """Nothing to put back."""


def weights(start: PretrainedWeights, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    tuning = TrainingSettings(weight_decay=0.1, **changes.pop("tuning", {}))
    run = RunSettings(**{**RUN.__dict__, **changes})
    model = train_task(
        *(start, TASK, TASK.items(INPUTS, start.tokenizer), run, tuning),
        device=torch.device("cpu"),
        precision="fp32",
        keep_head=False,
        open_log=lambda done: RunLog(Journal(folder, resume_step=done), Console()),
    )
    return model.state_dict()


@pytest.mark.parametrize("bias_correction", [True, False])
def test_compact_embeddings_change_nothing(
    start: PretrainedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias_correction: bool
) -> None:
    compact = weights(start, tmp_path / "a", tuning={"bias_correction": bias_correction})
    monkeypatch.setattr(tune_module, "CompactEmbeddings", Whole)
    whole = weights(start, tmp_path / "b", tuning={"bias_correction": bias_correction})
    assert compact.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(compact[name], tensor, atol=2e-6, rtol=1e-5, msg=name)
    before = start.tensors["bert.embeddings.word_embeddings.weight"]
    moved = (whole["encoder.word_embeddings.weight"] - before).abs().amax(1)
    assert (moved > 1e-3).sum() > 5  # tuned
    assert ((moved > 0) & (moved < 1e-3)).sum() > 5  # only shrunk


def test_the_start_is_left_as_it_was(start: PretrainedWeights, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in start.tensors.items()}
    weights(start, tmp_path)
    for name, tensor in before.items():
        assert torch.equal(start.tensors[name], tensor), name


def test_a_seed_decides_everything(start: PretrainedWeights, tmp_path: Path) -> None:
    first, again = weights(start, tmp_path / "a"), weights(start, tmp_path / "b")
    other = weights(start, tmp_path / "c", seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def test_batches_taken_in_parts_are_the_same(start: PretrainedWeights, tmp_path: Path) -> None:
    """Without dropout: with it, parts draw other numbers."""
    from dataclasses import replace

    calm = replace(
        start,
        config=replace(start.config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    )
    whole = weights(calm, tmp_path / "a")
    parts = weights(calm, tmp_path / "b", tuning={"max_tokens": 12})
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-5, rtol=1e-3, msg=name)


def test_the_journal_has_losses_and_rates(start: PretrainedWeights, tmp_path: Path) -> None:
    weights(start, tmp_path)
    begin, record, end = read_journal(tmp_path / "journal.jsonl")
    assert (begin["kind"], begin["steps_total"], begin["learning_rate"]) == ("start", 6, 3e-3)
    assert record["step"] == 6  # three updates an epoch
    assert record["examples"] == 10
    assert record["loss"] > 0
    assert (end["kind"], end["reason"]) == ("end", "finished")


def test_a_diverged_run_says_so(start: PretrainedWeights, tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match="diverged"):
        weights(start, tmp_path, learning_rate=1e30)


@pytest.mark.parametrize("field", ["weight_decay", "max_gradient_norm"])
def test_settings_that_are_no_numbers_are_refused(field: str) -> None:
    """They would turn every weight to NaN, and the learning rate would be blamed."""
    with pytest.raises(BertkitError, match=field):
        TrainingSettings(**{field: math.nan})  # type: ignore[arg-type]
    with pytest.raises(BertkitError, match=field):  # JSON has no infinity
        TrainingSettings(**{field: math.inf})  # type: ignore[arg-type]
