"""A tuned model directory → network, task, tokenizer: bertkit's own and Hugging Face's.

bertkit's directories say in `bertkit.json` what they are for. Of others, `config.json` names the
class (BertForSequenceClassification, ...) and the labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from bertkit.config import fits
from bertkit.errors import BertkitError, nearest
from bertkit.files import read_json
from bertkit.model.directory import check_vocabulary, complete, load_config, load_model
from bertkit.model.families import heads_of
from bertkit.model.features import load_feature_model
from bertkit.model.saving import HEADS
from bertkit.model.start import model_folder, read_details
from bertkit.model.task_heads import ClassificationModel, TaskModel, load_bilstm_model
from bertkit.tasks.answer import Answer, usual_question_length
from bertkit.tasks.choose import Choose
from bertkit.tasks.classify import Classify, ClassifyMany
from bertkit.tasks.conll import are_entity_tags, entity_tags
from bertkit.tasks.regress import Regress
from bertkit.tasks.tag import Tag
from bertkit.tasks.task import Task
from bertkit.tokens.tokenizer import Tokenizer

TASKS: dict[str, Any] = {
    "classify": Classify,
    "multi-label": ClassifyMany,
    "regress": Regress,
    "choose": Choose,
    "tag": Tag,
    "answer": Answer,
}
"""Kind -> class."""

LABELLED = {"classify", "multi-label", "tag"}
"""Kinds whose class takes label names."""


class LoadedTask(NamedTuple):
    """A tuned model with everything needed to use it."""

    model: TaskModel
    """On the device, in evaluation mode."""
    task: Task[Any, Any]
    tokenizer: Tokenizer
    details: dict[str, Any]
    """The content of `bertkit.json`; of a foreign model, what was read off its config."""


def load_task_model(
    path: Path, device: torch.device, null_threshold: float | None = None
) -> LoadedTask:
    """Load a tuned model: a model directory, or a run directory that holds `model/`.

    Args:
        path: the directory.
        device: where the network goes.
        null_threshold: instead of the model's own; see `bertkit.predict.load.load`.

    Raises:
        BertkitError: there is no model, it is damaged, it was tuned for no task, or for one that
            has no such threshold.
    """
    folder = model_folder(path)
    details = task_details(folder)
    tokenizer = Tokenizer.load(folder)
    task = task_of(details, folder)
    if null_threshold is not None:
        task = with_null_threshold(task, details, null_threshold)
    check_no_answer(task, details, folder)
    model: Any
    if details.get("head") and details.get("frozen") is False:
        with torch.device("meta"):
            network = task.build(load_config(folder))
        model = load_bilstm_model(folder, network)
    elif details.get("head"):
        model = load_feature_model(folder)
    else:
        loaded = load_model(folder, task.build)
        if not isinstance(loaded.model, ClassificationModel):  # the others do not read the pooler
            needed = [name for name in loaded.new if not name.startswith("bert.pooler.")]
            loaded = replace(loaded, new=needed)
        model = complete(loaded, folder)
    check_vocabulary(model.config, tokenizer.size)
    return LoadedTask(model.to(device).eval(), task, tokenizer, details)


def check_no_answer(task: Task[Any, Any], details: Mapping[str, Any], folder: Path) -> None:
    """Refuse odds of no answer from the first token of a network that reads left to right.

    Raises:
        BertkitError: transformers, or bertkit before it read them at the last token, tuned it.
    """
    if not (isinstance(task, Answer) and task.null) or details.get("head"):
        return
    own = read_json(folder / "config.json").get("model_type") == "bertkit"
    if not own and load_config(folder).direction == "left_to_right":
        raise BertkitError(
            f"{folder} is left to right and was tuned to say at its first token, which sees no "
            "other, that there is no answer; tune it again with bertkit finetune"
        )


def with_null_threshold(
    task: Task[Any, Any], details: Mapping[str, Any], threshold: float
) -> Task[Any, Any]:
    """The task of answering where the null odds are not above the threshold (SQuAD 2.0).

    Raises:
        BertkitError: it is another task, or the model is known never to have seen a question
            without an answer.
    """
    if not isinstance(task, Answer):
        raise BertkitError(f"a null threshold is for models that answer, not for {task.kind}")
    if not task.null and "null" in (details.get("settings") or {}):
        raise BertkitError(
            "the model was tuned on questions that all have an answer, so it cannot tell where "
            "there is none; tune it on data with such questions"
        )
    return replace(task, null=True, threshold=threshold)


def task_details(folder: Path) -> dict[str, Any]:
    """What a tuned model is for.

    Raises:
        BertkitError: it is for no task.
    """
    details = read_details(folder)
    if str(details.get("task")) in TASKS:
        return details
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        load_config(folder)  # which checks the sizes
        config = read_json(folder / "config.json")
    names = config.get("architectures") or ["none"]
    if not isinstance(names, list):
        raise BertkitError(f"{folder / 'config.json'}: architectures is {names!r:.40}, not a list")
    problem = str(config.get("problem_type") or "").removeprefix("single_label_classification")
    labels = [name for _, name in sorted(numbered_labels(config, folder).items())]
    found = [
        kind for kind, (head, problems) in HEADS.items()
        if head in heads_of(names[0]) and problems in ("", problem)
    ]  # fmt: skip
    if config.get("is_decoder") and set(found) & {"classify", "multi-label", "regress", "choose"}:
        raise BertkitError(
            f"{folder} is left to right and was tuned on its first token, which sees no other; "
            "tune it again with bertkit finetune, which reads the last one"
        )
    if not found:
        what = details.get("task") or names[0]
        raise BertkitError(
            f"{folder} was tuned for no task ({what}); run bertkit finetune, or use "
            "bertkit predict fill-mask"
        )
    kind = found[-1] if problem else found[0]
    if kind == "classify" and len(labels) == 1:
        kind = "regress"
    longest = config.get("max_position_embeddings", 512)
    if kind == "answer":
        window = min(384, longest)
        settings = {"longest": window, "question_length": usual_question_length(window)}
        return {"task": kind, "labels": list(Answer.labels), "settings": settings}
    entities = {"entities": are_entity_tags(entity_tags(labels))} if kind == "tag" else {}
    names = labels if kind in LABELLED else []  # of others transformers writes LABEL_0, LABEL_1
    return {"task": kind, "labels": names, "settings": {"longest": longest, **entities}}


def numbered_labels(config: Mapping[str, Any], folder: Path) -> dict[int, str]:
    """`id2label` with numbers as keys; two labels where it is absent, as in transformers.

    Raises:
        BertkitError: it is something else.
    """
    labels = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    try:
        return {int(number): str(name) for number, name in labels.items()}
    except (AttributeError, ValueError):
        what = f"{labels!r:.40}"
        raise BertkitError(
            f"{folder / 'config.json'}: id2label is {what}; it must map numbers to names"
        ) from None


def task_of(details: Mapping[str, Any], source: Path) -> Task[Any, Any]:
    """The task that `bertkit.json` describes.

    Raises:
        BertkitError: its settings are not those of the kind.
    """
    kind, names = details["task"], details.get("labels")
    given = details.get("settings") or {}
    named = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    if not isinstance(given, dict) or (kind in LABELLED and not named):
        raise BertkitError(
            f"{source / 'bertkit.json'}: labels must be a list of names, and settings an object; "
            "restore or remake the model"
        )
    if kind in LABELLED and len(set(names or ())) < len(names or ()):
        [(twice, _)] = Counter(map(str, names or ())).most_common(1)
        raise BertkitError(
            f"{source}: two labels are called {twice!r}; give each its own name (id2label in "
            "config.json, or labels in bertkit.json)"
        )
    types = get_type_hints(TASKS[kind]) if kind in TASKS else {}
    for name, value in given.items():
        if name in types and not fits(value, types[name]):
            raise BertkitError(
                f"{source / 'bertkit.json'}: the setting '{name}' cannot be {value!r:.40}; "
                "restore or remake the model"
            )
    labels = {"labels": tuple(names or ())} if kind in LABELLED else {}
    settings = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    try:
        return TASKS[kind](**labels, **settings)
    except (TypeError, KeyError) as error:
        hint = nearest(str(kind), TASKS)
        raise BertkitError(
            f"{source / 'bertkit.json'}: unknown task or settings ({error}){hint}"
        ) from None
