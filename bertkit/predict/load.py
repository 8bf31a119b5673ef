"""`load`: any trained model, ready to be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertkit.errors import BertkitError
from bertkit.model.families import heads_of
from bertkit.model.pooling import optional_json
from bertkit.model.saving import HEADS
from bertkit.model.start import model_folder, read_details
from bertkit.predict.predictor import Predictor, load_pretrained
from bertkit.predict.tasks import PREDICTORS, TaskPredictor
from bertkit.tasks.load import TASKS, load_task_model
from bertkit.training.devices import choose_device


def load(
    path: Path | str | Sequence[Path | str],
    *,
    device: str = "auto",
    precision: str = "auto",
    null_threshold: float | None = None,
) -> Predictor | TaskPredictor:
    """Load a trained model for use.

    Args:
        path: a model directory or a run directory; several tuned models make an ensemble.
        device: "auto", "cpu", "cuda", ...
        precision: of a tuned model: "fp32", "bf16", "int8" (CPUs only), or "auto": bf16 where the
            device is made for it, else fp32.
        null_threshold: of a model that answers: there is no answer where the odds of none, score of
            none minus score of the best span, are above it. The model's own where not given; one
            tuned with transformers has none, and gives an answer to everything.

    Returns:
        A `Predictor` for a pre-trained model, else what the model was tuned for: a
        `TextPredictor`, `ChoicePredictor`, `TagPredictor` or `AnswerPredictor`.

    Raises:
        BertkitError: there is no model, it is damaged, or the models do not go together.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    if not paths:
        raise BertkitError("there is no model to load; name at least one")
    folder = model_folder(paths[0])
    if len(paths) == 1 and not is_tuned(folder):
        if null_threshold is not None:
            raise BertkitError(f"{folder} was tuned for no task; a threshold is of answers")
        return load_pretrained(folder, device=device)
    where = choose_device(device)
    loaded = [load_task_model(one, where, null_threshold) for one in paths]
    return PREDICTORS[loaded[0].task.kind](loaded, where, precision)


def is_tuned(folder: Path) -> bool:
    """Whether a model directory holds a tuned model."""
    if str(read_details(folder).get("task")) in TASKS:
        return True
    named = optional_json(folder / "config.json").get("architectures")
    tuned = {head for head, _ in HEADS.values()}
    return isinstance(named, list) and any(tuned & heads_of(str(name)) for name in named)
