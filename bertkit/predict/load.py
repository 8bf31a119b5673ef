"""`load`, which loads any trained model for use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertkit.checkpoints.families import weight_head_names
from bertkit.checkpoints.pretrained import model_folder, read_details, resolve_model
from bertkit.checkpoints.save import SAVED_HEADS
from bertkit.errors import BertkitError
from bertkit.model.pooling import read_optional_json
from bertkit.predict.embeddings import Embedder, load_embedder
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
) -> Predictor | TaskPredictor | Embedder:
    """Load a trained model for use.

    Args:
        path: a model directory, a run directory or a model of the hub; several fine-tuned models
            make an ensemble.
        device: "auto", "cpu", "cuda", ...
        precision: "fp32", "bf16", "int8" (CPUs only), or "auto": bf16 if the device computes it
            fast, else fp32. A pre-trained model without a task computes in fp32.
        null_threshold: the null odds (score of no answer minus score of the best span) above which
            a question answering model gives no answer. The default is the threshold saved with the
            model; a model fine-tuned with transformers has none and answers every question.

    Returns:
        By the model's task a `TextPredictor`, `ChoicePredictor`, `TagPredictor` or
        `AnswerPredictor`; an `Embedder` for a model of sentence-transformers; a `Predictor` for any
        other pre-trained model.

    Raises:
        BertkitError: there is no model, it is damaged, or the models cannot form an ensemble.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if len(paths) == 1:
        folder = resolve_model(Path(paths[0]))
        embeds = (folder / "modules.json").is_file()
        if embeds or not is_tuned(model_folder(folder)):
            if null_threshold is not None:
                raise BertkitError(f"{folder} was not fine-tuned for a task; it has no threshold")
            if embeds:
                return load_embedder(folder, device=device, precision=precision)
            return load_pretrained(folder, device=device)
        paths = [folder]
    return load_predictor(paths, device=device, precision=precision, null_threshold=null_threshold)


def load_predictor(
    paths: Sequence[Path | str],
    *,
    device: str = "auto",
    precision: str = "auto",
    null_threshold: float | None = None,
) -> TaskPredictor:
    """Load one fine-tuned model, or several for an ensemble; see `load`.

    Raises:
        BertkitError: see `load`; or a model was not fine-tuned for a task.
    """
    if not paths:
        raise BertkitError("there is no model to load; name at least one")
    where = choose_device(device)
    loaded = [load_task_model(Path(one), where, null_threshold) for one in paths]
    return PREDICTORS[SPECS[loaded[0].task.task_type].example](loaded, where, precision)


def is_tuned(folder: Path) -> bool:
    """Return whether a model directory contains a fine-tuned model."""
    if str(read_details(folder).get("task")) in SPECS:
        return True
    named = read_optional_json(folder / "config.json").get("architectures")
    tuned = {head for head, _ in SAVED_HEADS.values()}
    return isinstance(named, list) and any(tuned & weight_head_names(str(name)) for name in named)
