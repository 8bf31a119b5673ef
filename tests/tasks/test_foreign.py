"""Tuned models as transformers and others save them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.explain.trace import trace_example
from bertkit.finetuning.heads import same_task

from bertkit import load
from bertkit.checkpoints.extend import extend_vocabulary
from bertkit.checkpoints.pretrained import load_config, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.cli.export import export_command
from bertkit.cli.options import ColumnFlags
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.model.heads import PretrainingModel
from bertkit.tasks.classification import Classification
from bertkit.tasks.entities import WordsExample
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.saved import load_task_model
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tokenizer.wordpiece import Tokenizer

CPU = torch.device("cpu")


def theirs(folder: Path, task: Any, pretrained: Path, **config: Any) -> Path:
    """A directory without `bertkit.json`."""
    torch.manual_seed(0)
    model = task.build(load_config(pretrained))
    save_model(folder, model, Tokenizer.load(pretrained), {"task": task.task_type})
    (folder / "bertkit.json").unlink()
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **config})
    return folder


@pytest.mark.parametrize(
    ("task", "names"),
    [
        (MultipleChoice(), ["LABEL_0", "LABEL_1"]),
        (QuestionAnswering(), ["LABEL_0", "LABEL_1"]),
        (Regression(), ["LABEL_0"]),
    ],
    ids=["multiple-choice", "question-answering", "regression"],
)
def test_names_that_transformers_makes_up_are_nobodys_labels(
    task: Any, names: list[str], pretrained: Path, tmp_path: Path
) -> None:
    """Its config.json has two labels where none are written; exports and new tunings go on."""
    folder = theirs(tmp_path / "theirs", task, pretrained)
    config = read_json(folder / "config.json")
    del config["id2label"], config["label2id"]
    if task.task_type == "regression":
        config["id2label"] = {"0": "LABEL_0"}
    write_json(folder / "config.json", config)
    assert load_task_model(folder, CPU).task.task_type == task.task_type
    export_command(folder, to="huggingface", out=tmp_path / "out")
    assert same_task(read_pretrained(folder), task)
    assert same_task(read_pretrained(tmp_path / "out"), task), "with the names that were exported"
    write_json(folder / "bertkit.json", {"task": task.task_type, "settings": {"max_length": 30}})
    assert same_task(read_pretrained(folder), task)
    assert load_task_model(folder, CPU).task.max_length == 30
    write_json(folder / "bertkit.json", {"extended": {"pieces": 2}})
    assert same_task(read_pretrained(folder), task), "as after bertkit vocab extend"


def test_a_number_of_labels_without_names(pretrained: Path, tmp_path: Path) -> None:
    folder = theirs(tmp_path / "theirs", Classification(("a", "b", "c")), pretrained)
    config = read_json(folder / "config.json")
    del config["id2label"], config["label2id"]
    write_json(folder / "config.json", {**config, "num_labels": 10**12})
    with pytest.raises(BertkitError, match="num_labels is 1000000000000"):
        load_task_model(folder, CPU)
    write_json(folder / "config.json", {**config, "id2label": {"0": "a", "1": "b", "5": "c"}})
    with pytest.raises(BertkitError, match="id2label is"):  # no name for output 2
        load_task_model(folder, CPU)
    write_json(folder / "config.json", {**config, "num_labels": 3})
    found = load_task_model(folder, CPU).task
    assert isinstance(found, Classification)
    assert found.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_labels_of_padding_are_no_tags(pretrained: Path, tmp_path: Path) -> None:
    labels = ("O", "B-PER", "[PAD]", "X")
    names = {str(number): name for number, name in enumerate(labels)}
    folder = theirs(tmp_path / "theirs", TokenClassification(labels), pretrained, id2label=names)
    loaded = load_task_model(folder, CPU)
    assert isinstance(loaded.task, TokenClassification)
    assert loaded.task.entities
    given = [WordsExample("0", ("river", "stone"), None, 0, "f")]
    items = loaded.task.items(given, loaded.tokenizer)
    logits = np.tile(np.float32([0.0, 1.0, 5.0, 9.0]), (4, 1))
    [found] = loaded.task.decode(given, items, [[logits]])
    assert found.tags == ("B-PER", "B-PER")
    assert found.entities == (("PER", 0, 1), ("PER", 1, 2))


def test_two_labels_of_one_name_are_refused(pretrained: Path, tmp_path: Path) -> None:
    names = {"0": "wet", "1": "dry", "2": "wet"}
    task = Classification(("a", "b", "c"))
    folder = theirs(tmp_path / "theirs", task, pretrained, id2label=names)
    with pytest.raises(BertkitError, match="two labels are called 'wet'; give each its own name"):
        load(folder, device="cpu")


def test_a_tuned_head_is_not_lost_in_an_export(pretrained: Path, tmp_path: Path) -> None:
    """Without a class in config.json, or in a checkpoint of Google's, nobody says of which task."""
    folder = theirs(tmp_path / "theirs", Classification(("a", "b")), pretrained, architectures=None)
    out = tmp_path / "out"
    with pytest.raises(
        BertkitError, match=r"the head of a fine-tuned model \(classifier\..* --head encoder"
    ):
        export_command(folder, to="huggingface", out=out)
    with pytest.raises(BertkitError, match=r"lacks cls.* and holds the head of a fine-tuned model"):
        load(folder, device="cpu")
    export_command(folder, to="huggingface", out=out, head="encoder")
    named = theirs(tmp_path / "named", Classification(("a", "b")), pretrained)
    export_command(named, to="tensorflow", out=tmp_path / "google")
    with pytest.raises(BertkitError, match="the head of a fine-tuned model"):
        export_command(tmp_path / "google", to="huggingface", out=out)


def test_a_cross_encoder_of_sentence_transformers_is_a_classifier(
    pretrained: Path, tmp_path: Path
) -> None:
    """It has modules.json like an embedding model, whose vectors it does not give."""
    folder = theirs(tmp_path / "theirs", Regression(), pretrained)
    said = load(folder, device="cpu", precision="fp32")("the river", "a stone").value
    module = {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    write_json(folder / "modules.json", [module])
    settings = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None}
    write_json(folder / "config_sentence_transformers.json", settings)
    extend_vocabulary(folder, tmp_path / "longer", words=["zzzebra"])
    for name in ("modules.json", "config_sentence_transformers.json"):
        assert (tmp_path / "longer" / name).read_bytes() == (folder / name).read_bytes()
    for one in (folder, tmp_path / "longer"):
        found = load(one, device="cpu", precision="fp32")
        assert found("the river", "a stone").value == pytest.approx(said, abs=1e-6)
        export_command(one, to="huggingface", out=tmp_path / "out")
        assert read_json(tmp_path / "out" / "export.json")["head"] == "regression"
        assert trace_example(one, "the river", "a stone").task == f"value {said:.4f}"


def test_modules_that_bertkit_does_not_know_are_copied(pretrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(pretrained, folder)
    names = ("", "1_Pooling", "2_Dense")
    modules = [{"path": one, "type": f"a.{one[2:] or 'Transformer'}"} for one in names]
    write_json(folder / "modules.json", modules)
    write_json(folder / "2_Dense" / "config.json", {"out_features": 8})
    extend_vocabulary(folder, tmp_path / "longer", words=["zzzebra"])
    for name in ("modules.json", "2_Dense/config.json"):
        assert (tmp_path / "longer" / name).read_bytes() == (folder / name).read_bytes()


def test_odds_of_no_answer_at_a_token_that_sees_nothing_are_refused(
    pretrained: Path, tmp_path: Path
) -> None:
    """As bertkit once tuned networks from left to right, and as transformers does."""
    config = replace(load_config(pretrained), direction="left_to_right")
    tokenizer = Tokenizer.load(pretrained)
    task = QuestionAnswering(null=True, max_length=30, max_question_length=8)
    details = {"task": "question-answering", "settings": task.settings()}
    save_model(tmp_path / "own", task.build(config), tokenizer, details)
    assert load(tmp_path / "own", device="cpu")("river", "stone").no_answer_probability > 0
    old = {"model_type": "bert", "is_decoder": True, "architectures": ["BertForQuestionAnswering"]}
    saved = read_json(tmp_path / "own" / "config.json")
    write_json(tmp_path / "own" / "config.json", saved | old)
    with pytest.raises(BertkitError, match=r"left to right .* fine-tune it again"):
        load(tmp_path / "own", device="cpu")
    (tmp_path / "own" / "bertkit.json").unlink()
    assert load(tmp_path / "own", device="cpu")("river", "stone").answer == "stone", "always one"
    with pytest.raises(BertkitError, match=r"left to right .* fine-tune it again"):
        load(tmp_path / "own", device="cpu", null_threshold=0)


def test_a_google_checkpoint_is_called_so(pretrained: Path, tmp_path: Path) -> None:
    export_command(pretrained, to="tensorflow", out=tmp_path / "google")
    with pytest.raises(BertkitError, match=r"is a Google checkpoint; .* bertkit export .*google"):
        load(tmp_path / "google", device="cpu")


def test_pickled_objects_are_not_called_damage(pretrained: Path, tmp_path: Path) -> None:
    folder = theirs(tmp_path / "theirs", Classification(("a", "b")), pretrained)
    (folder / "model.safetensors").unlink()
    torch.save(torch.nn.Linear(200, 200), folder / "pytorch_model.bin")
    with pytest.raises(
        BertkitError, match=r"holds Python objects, which bertkit does not run.*state_"
    ):
        load(folder, device="cpu")


@pytest.mark.parametrize("where", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_were_added_are_refused(pretrained: Path, tmp_path: Path, where: str) -> None:
    """Without tokenizer.json they would be read as something else, and nobody would know."""
    folder = theirs(tmp_path / "theirs", Classification(("a", "b")), pretrained)
    (folder / "tokenizer.json").unlink()
    known = {"[CLS]": 2}
    added = {**known, "[ENTITY]": 99}
    if where == "added_tokens.json":
        write_json(folder / where, known)
        load_task_model(folder, CPU)
        write_json(folder / where, added)
    else:
        config = read_json(folder / where)
        tokens = {str(number): {"content": token} for token, number in added.items()}
        write_json(folder / where, config | {"added_tokens_decoder": tokens})
    with pytest.raises(BertkitError, match=rf"{where}: added token '\[ENTITY\]'"):
        load_task_model(folder, CPU)


def test_a_network_of_one_segment(pretrained: Path, tmp_path: Path) -> None:
    """Its exports are tried on single texts, and pairs are refused in words."""
    config = replace(load_config(pretrained), type_vocab_size=1)
    tokenizer = Tokenizer.load(pretrained)
    save_model(tmp_path / "one", Classification(("a", "b")).build(config), tokenizer,
               {"task": "classification", "labels": ["a", "b"]})  # fmt: skip
    export_command(tmp_path / "one", to="huggingface", out=tmp_path / "out")
    assert read_json(tmp_path / "out" / "export.json")["check"]["sequences"] > 3
    (tmp_path / "pairs.csv").write_text("text,pair,label\nriver,stone,a\n")
    for file in ({"inputs": str(tmp_path / "pairs.csv")}, {"dev": str(tmp_path / "pairs.csv")}):
        with pytest.raises(BertkitError, match="one segment"):
            export_command(tmp_path / "one", to="huggingface", out=tmp_path / "out",
                   columns=ColumnFlags(pair="pair"), **file)  # fmt: skip
    save_model(tmp_path / "pairs", PretrainingModel(config), tokenizer, {"task": "pretraining"})
    with pytest.raises(BertkitError, match="one segment"):
        load(tmp_path / "pairs", device="cpu").next_sentence("river stone", "bridge")
