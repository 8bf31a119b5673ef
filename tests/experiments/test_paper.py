"""The paper's tables at their smallest size, on made-up data."""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.batch import pack
from experiments.paper.__main__ import main
from experiments.paper.data import MissingDataError, stand_in, task_folder
from experiments.paper.features import LAYERS, BiLSTM, BiLSTMClassifier, BiLSTMSpans, FeatureTagger
from experiments.paper.tables import TABLES, cells, read_scale

WORDS = "river stone bridge garden letter winter candle morning".split()  # noqa: SIM905
CONFIG = ModelConfig(
    vocab_size=30, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16, initializer_range=0.3,
)  # fmt: skip


def sentence(draw: random.Random, words: int = 6) -> str:
    return " ".join(draw.choices(WORDS, k=words)).capitalize() + "."


def write_squad(path: Path, paragraphs: int) -> None:
    draw, kept = random.Random(0), []
    for number in range(paragraphs):
        context = " ".join(sentence(draw) for _ in range(3))
        answer = context.split()[1]
        question = {
            "id": f"q{number}",
            "question": sentence(draw),
            "answers": [{"text": answer, "answer_start": context.index(answer)}],
        }
        kept.append({"context": context, "qas": [question]})
    data = {"version": "1.1", "data": [{"title": "T", "paragraphs": kept}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, and a few rows of SWAG, CoNLL-2003, SQuAD and MNLI's sample."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for name in ("text", "swag", "conll2003", "glue/MNLI-10k"):
        (folder / name).mkdir(parents=True)
    documents = ("\n".join(sentence(draw) for _ in range(8)) for _ in range(60))
    (folder / "text" / "corpus.txt").write_text("\n\n".join(documents))
    endings = [f"ending{i}" for i in range(4)]
    for name, rows in (("train", 12), ("val", 6)):
        with (folder / "swag" / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["video-id", "sent1", "sent2", *endings, "label"])
            for row in range(rows):
                choices = [sentence(draw, 3) for _ in endings]
                table.writerow([str(row), sentence(draw), "He", *choices, row % 4])
    for name, rows in (("train", 8), ("valid", 4)):
        lines = []
        for row in range(rows):
            lines += ["-DOCSTART- -X- -X- O", ""]
            for _ in range(2):
                lines += [f"{WORDS[row]} NN O B-LOC", f"{draw.choice(WORDS)} NN O O", ""]
        (folder / "conll2003" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    for name in ("train", "dev"):
        rows = [{"premise": "A\tb.", "hypothesis": "C.", "label": i % 3} for i in range(9)]
        text = "\n".join(map(json.dumps, rows))
        (folder / "glue" / "MNLI-10k" / f"{name}.jsonl").write_text(text)
        write_squad(folder / "squad" / f"{name}-v1.1.json", 8)
    return folder


def run(*words: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["experiments.paper", *map(str, words)])
        main()


@pytest.mark.slow
def test_tables_from_end_to_end(data: Path, tmp_path: Path) -> None:
    """Three networks and twenty runs on them; what is missing is named; runs are not repeated."""
    out = tmp_path / "out"
    command = ("table-4", "table-7", "table-5", "--data", data, "--out", out, "--device", "cpu")
    run(*command)
    found = json.loads((out / "table-4.json").read_text())
    assert set(found["rows"]["here, tiny"]["swag"]) <= {round(100 * i / 6, 2) for i in range(7)}
    page = (out / "table-7.md").read_text()
    assert "| Concat last four | paper | 96.1 |" in page
    assert len([line for line in page.splitlines() if "| here |" in line]) == 7
    found = json.loads((out / "table-5.json").read_text())
    assert set(found["missing"]) == {"mrpc", "sst-2"}
    assert found["stand_ins"] == {"mnli": "MNLI-10k", "qnli": "pairs made from SQuAD"}
    row = found["rows"]["LTR & No NSP + BiLSTM"]
    assert [len(row[name]) for name in ("mnli-m", "qnli", "squad-1.1")] == [1, 1, 1]
    assert "Not run: mrpc" in (out / "table-5.md").read_text()
    runs = {path: path.read_bytes() for path in (out / "runs").iterdir()}
    assert len(runs) == 20
    [one, *_] = runs
    one.unlink()
    (out / "table-7.md").unlink()
    run(*command)
    scores = {path: json.loads(path.read_text()) for path in runs}
    assert scores == {path: json.loads(content) for path, content in runs.items()}
    assert (out / "table-7.md").read_text() == page
    assert len(list((out / "networks").iterdir())) == 3


def test_every_table_at_every_scale() -> None:
    for name in ("tiny", "small", "base", "large"):
        scale = read_scale(name)
        for table in TABLES:
            found = cells(table, scale)
            assert found
            assert len({(cell.row, cell.column) for cell in found}) == len(found)
            assert all(scale.task(cell.run.task).epochs for cell in found)
            seen: dict[str, object] = {}
            for cell in found:  # a run has one name, which is of no other run
                assert seen.setdefault(cell.run.name, cell.run) == cell.run


def test_a_bilstm_reads_each_sequence_alone() -> None:
    torch.manual_seed(0)
    lstm = BiLSTM(8, 5, 0.0).eval()
    packed = pack([[2, 5, 3], [2, 7, 8, 9, 3], [2, 3]])
    hidden = torch.randn(10, 8)
    rows = torch.split(hidden, [3, 5, 2])
    wanted = torch.cat([lstm.lstm(row)[0] for row in rows])
    torch.testing.assert_close(lstm(hidden, packed), wanted)


@pytest.mark.parametrize("layers", LAYERS)
def test_only_the_head_on_frozen_features_is_trained(layers: str) -> None:
    torch.manual_seed(0)
    model = FeatureTagger(CONFIG, 3, layers, 5).train()
    packed = pack([[2, 7, 9, 8, 3], [2, 11, 3]])
    assert not model.encoder.training
    logits = model(packed)
    assert logits.shape == (8, 3)
    logits.square().sum().backward()
    assert all(parameter.grad is None for parameter in model.encoder.parameters())
    others = (p for name, p in model.named_parameters() if not name.startswith("encoder."))
    assert all(parameter.grad is not None for parameter in others)
    with torch.no_grad():
        states = model.encoder.layers_of(packed)
    wanted = {
        "embeddings": states[0],
        "second-to-last": states[3],
        "last": states[4],
        "weighted-sum": torch.stack(states[1:]).mean(0),
        "weighted-sum-last-four": torch.stack(states[1:]).mean(0),
        "concat-last-four": torch.cat(states[1:], dim=-1),
    }
    torch.testing.assert_close(model.features(packed), wanted[layers])


def test_bilstms_on_top_of_both_kinds_of_heads() -> None:
    packed = pack([[2, 7, 9, 8, 3], [2, 11, 3]])
    assert BiLSTMClassifier(CONFIG, 3)(packed).shape == (2, 3)
    assert BiLSTMSpans(CONFIG)(packed).shape == (8, 2)


def test_reduced_data_keeps_the_official_formats(data: Path, tmp_path: Path) -> None:
    folder = task_folder("conll-2003", data, tmp_path, 5, 2)
    assert (folder / "train.txt").read_text().count("-DOCSTART-") == 3
    assert (folder / "valid.txt").read_text().count("B-LOC") == 2
    folder = task_folder("mnli", data, tmp_path, 4, 0)
    header, *rows = (folder / "MNLI" / "train.tsv").read_text().splitlines()
    assert header.split("\t") == ["sentence1", "sentence2", "gold_label"]
    assert len(rows) == 4
    assert rows[0].startswith("A b.\tC.\t")
    folder = task_folder("qnli", data, tmp_path, 3, 0)
    rows = (folder / "QNLI" / "train.tsv").read_text().splitlines()[1:]
    assert len(rows) == 3
    assert {row.split("\t")[3] for row in rows} <= {"entailment", "not_entailment"}
    folder = task_folder("squad-1.1", data, tmp_path, 3, 2)
    articles = json.loads((folder / "train-v1.1.json").read_text())["data"]
    assert sum(len(article["paragraphs"][0]["qas"]) for article in articles) == 3
    assert stand_in("squad-1.1", data) == ""
    with pytest.raises(MissingDataError, match="MRPC"):
        task_folder("mrpc", data, tmp_path, 0, 0)
