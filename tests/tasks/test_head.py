"""Tuning other networks: from left to right, with a BiLSTM, and two frozen ones as an ELMo."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bertkit.datasets.examples import GoldAnswer, QuestionExample
from bertkit.finetuning.heads import same_task

from bertkit import (
    DataFiles,
    FinetuneSettings,
    QuestionColumns,
    TrainingSettings,
    WordColumns,
    finetune,
    load,
)
from bertkit.checkpoints.pretrained import load_config, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.export.export import write_export
from bertkit.export.source import read_export_source
from bertkit.files import read_json, write_json
from bertkit.finetuning.settings import Grid, HeadSettings
from bertkit.model.electra import ReplacedTokenModel
from bertkit.model.encoder import ModelConfig
from bertkit.model.features import FeatureModel
from bertkit.model.heads import PretrainingModel
from bertkit.model.task_heads import ClassificationModel, SpanModel, add_conditional_end
from bertkit.tasks.classification import Classification
from bertkit.tasks.question_answering import QuestionAnswering, end_scores
from bertkit.tasks.saved import load_task_model
from bertkit.tasks.task import make_batch
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

CPU = torch.device("cpu")
START = dict[str, Any]
UNITS = 32
"""Of a BiLSTM, instead of 768."""


@pytest.fixture
def begin(pretrained: Path, tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Path]:
    """A pre-trained network of other kinds: `begin("ltr", direction="left_to_right")`."""

    def make(name: str, *, discriminator: bool = False, **fields: Any) -> Path:
        torch.manual_seed(0)
        config: ModelConfig = replace(load_config(pretrained), **fields)
        model = (
            ReplacedTokenModel(config, 0.5)
            if discriminator
            else PretrainingModel(config, pairs=False)
        )
        save_model(tmp_path / name, model, tokenizer, {"task": "pretraining"})
        return tmp_path / name

    return make


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


PLACES = ("bridge", "garden", "letter", "meadow")
FILES = {
    "classification": lines(
        *(
            {"text": f"{word} {place}", "label": label}
            for word, label in (("river", "wet"), ("candle", "dry"))
            for place in PLACES
        )
    ),
    "token-classification": lines(
        *({"words": [p, "river", "stone"], "tags": ["O", "B-P", "I-P"]} for p in PLACES)
    ),
    "question-answering": lines(
        *({"question": "Where is it?", "context": f"In the {p}.", "answers": p} for p in PLACES)
    ),
}
COLUMNS = {
    "classification": None,
    "token-classification": WordColumns(words="words", tags="tags"),
    "question-answering": QuestionColumns(
        question="question", passage="context", answers="answers"
    ),
}


def tuned(
    kind: str, start: Path, write: Callable[[str, str], Path], out: Path, *, epochs: int = 8,
    **head: Any,
) -> Path:  # fmt: skip
    units = UNITS if head.get("head") == "bilstm" else 0
    file = str(write("train.jsonl", FILES[kind]))
    finetune(
        kind,
        start,
        out,
        files=DataFiles(train=file, dev=file),
        columns=COLUMNS[kind],
        settings=FinetuneSettings(
            grid=Grid(learning_rate=(5e-3,), batch_size=(4,), epochs=(epochs,)),
            training=TrainingSettings(precision="fp32"),
            head=HeadSettings(units=units, **head),
            device="cpu",
        ),
    )
    return out


def answers(out: Path, kind: str) -> Any:
    predict = load(out, device="cpu", precision="fp32")
    if kind == "classification":
        return [predict(text).probabilities for text in ("river meadow", "candle garden letter")]
    if kind == "token-classification":
        return [[e.text for e in predict(text).entities] for text in ("letter river stone",)]
    return [predict("Where is it?", f"In the {place}.").answer for place in PLACES]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["linear", "bilstm"])
@pytest.mark.parametrize("kind", FILES)
def test_left_to_right_tuned_saved_and_loaded(
    kind: str, head: str, begin: Any, write: Any, tmp_path: Path
) -> None:
    start = begin("ltr", direction="left_to_right")
    out = tuned(kind, start, write, tmp_path / "run", head=head)
    config = read_json(out / "model" / "config.json")
    details = read_json(out / "model" / "bertkit.json")
    assert load_config(out / "model").direction == "left_to_right", "causal in fine-tuning, too"
    assert (out / "model" / "head.safetensors").is_file() == (head == "bilstm")
    if head == "bilstm":
        assert (details["head"], details["frozen"]) == ("bilstm", False)
        assert config["architectures"] == ["BertModel"]
    else:
        assert "head" not in details
        own = {"classification": "bertkit", "token-classification": "BertForTokenClassification",
               "question-answering": "bertkit"}  # fmt: skip
        assert config["architectures"] == [own[kind]]
    # what was predicted in training is what the directory predicts
    loaded = load_task_model(out, CPU)
    assert (loaded.model.bilstm is not None) == (head == "bilstm")
    dev = [json.loads(row) for row in (out / "results" / "dev.jsonl").read_text().splitlines()]
    assert len(dev) == len(FILES[kind].splitlines())
    scores = read_json(out / "results.json")["scores"]["dev"]
    assert scores == details["scores"]["dev"]
    again = answers(out, kind)
    assert again == answers(out / "model", kind)
    if kind == "classification":
        found = [max(row, key=row.__getitem__) for row in again]
        assert found == ["wet", "dry"]
        assert scores["accuracy"] == 1.0


def test_no_answer_is_read_where_everything_has_been_seen(begin: Any, tokenizer: Tokenizer) -> None:
    """[CLS] of a network from left to right is the same before every question; the last [SEP] not.

    The two stand in each other's place, so targets and null odds are where they always are.
    """
    task = QuestionAnswering(null=True, max_length=40, max_question_length=8)
    asked = [
        QuestionExample(str(i), "river", f"{place} stone", None, "f")
        for i, place in enumerate(PLACES)
    ]
    items = task.items(asked, tokenizer)
    batch = make_batch([part for item in items.items for part in item.parts]).packed
    for direction, other in (("left_to_right", False), ("bidirectional", True)):
        loaded = read_pretrained(begin(direction, direction=direction)).build(
            task.build, keep_head=False
        )
        model = loaded.model.eval()
        logits = model(batch)
        plain = model.qa_outputs(model.encoder(batch))
        first, last = batch.first_tokens, batch.last_tokens
        assert torch.equal(logits[first], plain[first] if other else plain[last])
        assert torch.equal(logits[last], plain[last] if other else plain[first])
        inside = torch.ones(len(logits), dtype=torch.bool)
        inside[first] = inside[last] = False
        assert torch.equal(logits[inside], plain[inside])
        assert len(logits[first].unique(dim=0)) == len(PLACES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "discriminator", "architecture"),
    [
        ({"embedding_size": 8, "share_layers": True}, False, "AlbertForSequenceClassification"),
        ({"embedding_size": 8}, True, "ElectraForSequenceClassification"),
        ({}, True, "ElectraForSequenceClassification"),
        ({"direction": "right_to_left"}, False, "bertkit"),
    ],
    ids=["albert", "electra", "electra-base", "right-to-left"],
)
def test_other_networks_are_tuned(
    fields: START, discriminator: bool, architecture: str, begin: Any, write: Any, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    start = begin("start", discriminator=discriminator, **fields)
    out = tuned("classification", start, write, tmp_path / "run", epochs=12)
    said = capfd.readouterr().err
    assert "the checkpoint has no pooler: it is new" in said
    assert ("transformers has no class" in said) is (architecture == "bertkit")
    assert read_json(out / "model" / "config.json")["architectures"] == [architecture]
    assert read_json(out / "results.json")["scores"]["dev"]["accuracy"] > 0.7
    assert all(sum(row.values()) == pytest.approx(1) for row in answers(out, "classification"))
    for name, value in fields.items():
        assert getattr(load_config(out / "model"), name) == value


def test_a_bilstm_on_a_start_of_the_same_task_is_new(
    pretrained: Path, write: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its linear layer is twice as wide, so the start's cannot be kept."""
    first = tuned("classification", pretrained, write, tmp_path / "first", epochs=1)
    capfd.readouterr()
    second = tuned("classification", first, write, tmp_path / "second", epochs=1)
    assert "reusing the checkpoint's task head" in capfd.readouterr().err
    third = tuned("classification", first, write, tmp_path / "third", epochs=1, head="bilstm")
    assert "the task head is new" in capfd.readouterr().err
    fourth = tuned("classification", third, write, tmp_path / "fourth", epochs=1)
    assert "the task head is new" in capfd.readouterr().err
    assert isinstance(load_task_model(second, CPU).model, ClassificationModel)
    assert load_task_model(third, CPU).model.bilstm is not None
    assert load_task_model(fourth, CPU).model.bilstm is None


@pytest.mark.parametrize("direction", ["bidirectional", "left_to_right"])
def test_ends_given_starts_are_tuned_saved_and_loaded(
    direction: str, begin: Any, write: Any, tmp_path: Path
) -> None:
    out = tuned(
        "question-answering", begin("start", direction=direction), write, tmp_path / "run",
        epochs=16, head="conditional",
    )  # fmt: skip
    details, config = (read_json(out / "model" / f"{name}.json") for name in ("bertkit", "config"))
    assert (details["head"], details["frozen"]) == ("conditional", False)
    assert config["architectures"] == ["BertModel"]
    assert answers(out, "question-answering") == [f"{place}" for place in PLACES]
    rows = [json.loads(row) for row in (out / "results" / "dev.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == [*PLACES]
    predict = load(out, device="cpu", precision="fp32")
    found = [predict("Where is it?", f"In the {place}.").probability for place in PLACES]
    assert found == pytest.approx([row["probability"] for row in rows], abs=1e-5)
    with pytest.raises(BertkitError, match="cannot form an ensemble"):
        load([out, out], device="cpu")
    with pytest.raises(BertkitError, match="ends given starts"):
        write_export(read_export_source(out), "huggingface", tmp_path / "export")
    with pytest.raises(BertkitError, match=r"conditional end .* has no padded form"):
        write_export(read_export_source(out), "onnx", tmp_path / "export")
    write_json(out / "model" / "bertkit.json", {**details, "head": "bilstm"})
    with pytest.raises(BertkitError, match="of another shape or type than in 'bilstm'"):
        load(out, device="cpu")


def test_the_loss_of_ends_given_starts_is_their_probability(
    pretrained: Path, tokenizer: Tokenizer
) -> None:
    torch.manual_seed(0)
    model = add_conditional_end(SpanModel(load_config(pretrained))).eval()
    for weight in (model.qa_outputs.weight, model.pair_outputs.weight):
        torch.nn.init.normal_(weight)  # so that the terms are not all alike
    task = QuestionAnswering(max_length=32, max_question_length=8)
    contexts = {"In the garden.": "garden", "candle letter stone": "letter stone"}
    given = [
        QuestionExample(str(i), "Where?", text, (GoldAnswer(answer, text.index(answer)),), "row")
        for i, (text, answer) in enumerate(contexts.items())
    ]
    parts = [item.parts[0] for item in task.items(given, tokenizer).items]
    batch = make_batch(parts, task.targets)
    loss = task.objective(model, batch)["loss"]
    wanted = 0.0
    for part in parts:
        with torch.inference_mode():
            outputs = model(make_batch([part]).packed)
        start, end, _ = part.target
        assert end_scores(outputs.numpy()).shape == (len(outputs), len(outputs))
        assert 0 < start <= end
        wanted -= float(outputs[:, 0].log_softmax(0)[start]) / 2
        wanted -= float(end_scores(outputs.numpy())[start, end]) / 2
    assert loss.value.item() == pytest.approx(wanted, rel=1e-5)
    loss.value.backward()
    assert model.pair_outputs.weight.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [("classification", {}), ("question-answering", {"frozen": True})],
)
def test_ends_given_starts_are_for_answers(
    kind: str, options: Any, pretrained: Path, write: Any, tmp_path: Path
) -> None:
    with pytest.raises(BertkitError, match="--head conditional is for question-answering"):
        tuned(kind, pretrained, write, tmp_path / "run", head="conditional", **options)


@pytest.mark.slow
def test_an_elmo_of_two_directions(begin: Any, write: Any, tmp_path: Path) -> None:
    left, right = (
        begin("ltr", direction="left_to_right"),
        begin("rtl", direction="right_to_left", embedding_size=8),
    )
    out = tuned(
        "token-classification", left, write, tmp_path / "run", epochs=30, frozen=True,
        head="bilstm", beside=str(right),
    )  # fmt: skip
    assert read_json(out / "finetune.json")["beside"] == str(right)
    model = load_task_model(out, CPU).model
    assert isinstance(model, FeatureModel)
    assert model.beside is not None
    assert (model.config.direction, model.beside.config.direction) == (
        "left_to_right",
        "right_to_left",
    )
    assert model.bilstm.lstm.input_size == 64
    for folder, encoder in ((left, model.encoder), (right, model.beside)):
        tensors = read_pretrained(folder).tensors
        weight = encoder.word_embeddings.weight
        assert torch.equal(weight, tensors["bert.embeddings.word_embeddings.weight"]), "frozen"
    assert (
        answers(out, "token-classification")
        == answers(out / "model", "token-classification")
        == [["river stone"]]
    )
    for precision in ("bf16", "fp32"):
        fast = load(out, device="cpu", precision=precision)
        assert [e.text for e in fast("letter river stone").entities] == ["river stone"]
    # the same command again has nothing to do, and makes the same
    before = (out / "model" / "head.safetensors").read_bytes()
    again = tuned(
        "token-classification", left, write, tmp_path / "again", epochs=30, frozen=True,
        head="bilstm", beside=str(right),
    )  # fmt: skip
    assert (again / "model" / "head.safetensors").read_bytes() == before


def test_beside_must_fit(begin: Any, write: Any, tmp_path: Path) -> None:
    left = begin("ltr", direction="left_to_right")
    vocabulary = [*SPECIAL_TOKENS, "river", "stone"]
    foreign = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    config = replace(load_config(left), vocab_size=len(vocabulary))
    save_model(tmp_path / "foreign", PretrainingModel(config), foreign, {})
    short = replace(load_config(left), max_position_embeddings=16)
    save_model(tmp_path / "short", PretrainingModel(short), Tokenizer.load(left), {})
    wrong = [
        (
            {"frozen": True, "beside": str(tmp_path / "short")},
            "has 16 positions, .* --max-length 16",
        ),
        ({"frozen": True, "beside": str(tmp_path / "foreign")}, "has another tokenizer than"),
        ({"frozen": True, "beside": str(tmp_path / "nowhere")}, "no model directory .*nowhere"),
        ({"frozen": True, "beside": str(left), "layers": "weighted-sum"}, "is for one encoder"),
        ({"beside": str(left)}, "go with --frozen"),
        ({"head": "bilst"}, "did you mean 'bilstm'"),
    ]
    for head, message in wrong:
        with pytest.raises(BertkitError, match=message):
            tuned("token-classification", left, write, tmp_path / "run", **head)


@pytest.mark.parametrize(
    ("task", "head", "kept"),
    [
        (QuestionAnswering(), "QuestionAnswering", True),
        (Classification(("dry", "wet")), "SequenceClassification", True),
        (Classification(("dry", "damp")), "SequenceClassification", False),
        (QuestionAnswering(), "MaskedLM", False),
    ],
    ids=["question-answering", "same labels", "other labels", "pre-trained"],
)
def test_the_head_of_a_model_tuned_by_others_is_kept(
    begin: Any, tokenizer: Tokenizer, tmp_path: Path, task: Any, head: str, kept: bool
) -> None:
    """As transformers saves it: no bertkit.json, and the task in config.json."""
    folder = tmp_path / "theirs"
    save_model(folder, task.build(load_config(begin("own"))), tokenizer, {})
    (folder / "bertkit.json").unlink()
    config = read_json(folder / "config.json")
    names = {"architectures": [f"BertFor{head}"], "id2label": {"0": "dry", "1": "wet"}}
    write_json(folder / "config.json", config | names)
    start = read_pretrained(folder)
    assert same_task(start, task) == kept
    if kept:
        assert not start.build(task.build, keep_head=True).missing_keys
