"""`load`, which loads any trained model for use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertkit.checkpoints.families import weight_head_names
from bertkit.checkpoints.pretrained import model_folder, read_details
from bertkit.checkpoints.save import SAVED_HEADS
from bertkit.errors import BertkitError
from bertkit.model.pooling import read_optional_json
from bertkit.predict.predictors import PREDICTORS, TaskPredictor
from bertkit.predict.pretrained import Predictor, load_pretrained
from bertkit.tasks.saved import load_task_model
from bertkit.tasks.spec import SPECS
from bertkit.training.device import choose_device


def load(
    path: Path | str | Sequence[Path | str],
    *,
    device: str = "auto",
    precision: str = "auto",
    null_threshold: float | None = None,
) -> Predictor | TaskPredictor:
    """Load a trained model for use.

    Args:
        path: a model directory or a run directory; several fine-tuned models make an ensemble.
        device: "auto", "cpu", "cuda", ...
        precision: the precision of a fine-tuned model: "fp32", "bf16", "int8" (CPUs only), or
            "auto": bf16 if the device computes it fast, else fp32.
        null_threshold: the null odds (score of no answer minus score of the best span) above which
            a question answering model gives no answer. The default is the threshold saved with the
            model; a model fine-tuned with transformers has none and answers every question.

    Returns:
        A `Predictor` for a pre-trained model, else a `TextPredictor`, `ChoicePredictor`,
        `TagPredictor` or `AnswerPredictor`, by the model's task.

    Raises:
        BertkitError: there is no model, it is damaged, or the models cannot form an ensemble.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    if not paths:
        raise BertkitError("there is no model to load; name at least one")
    folder = model_folder(paths[0])
    if len(paths) == 1 and not is_tuned(folder):
        if null_threshold is not None:
            raise BertkitError(f"{folder} was not fine-tuned for a task, so has no null threshold")
        return load_pretrained(folder, device=device)
    where = choose_device(device)
    loaded = [load_task_model(one, where, null_threshold) for one in paths]
    return PREDICTORS[SPECS[loaded[0].task.task_type].example](loaded, where, precision)


def is_tuned(folder: Path) -> bool:
    """Return whether a model directory contains a fine-tuned model."""
    if str(read_details(folder).get("task")) in SPECS:
        return True
    named = read_optional_json(folder / "config.json").get("architectures")
    tuned = {head for head, _ in SAVED_HEADS.values()}
    return isinstance(named, list) and any(tuned & weight_head_names(str(name)) for name in named)
