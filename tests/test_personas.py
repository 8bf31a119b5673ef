"""Three people use an installed wheel: an analyst, an engineer and a user of transformers.

Each works in an empty folder outside the repository with commands and Python of their own, and only
what is in the wheel is imported. The steps check outputs: files, numbers, codes and exit statuses.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from bertkit.checkpoints.publish import new_card
from bertkit.checkpoints.save import save_model
from bertkit.model.heads import PretrainingModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import WORDS, make_document, tiny_config
from tests.hub_server import running_hub
from tests.markdown import ROOT, blocks
from tests.tools.installed import Person, finish, install_wheel

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]  # which is built once


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed wheel of this repository."""
    for needed in ("hatchling", "pip"):
        pytest.importorskip(needed, reason=f"{needed}, which builds the wheel, is not installed")
    return install_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def person(site: Path, tmp_path: Path) -> Person:
    found = Person(site, tmp_path)
    imported = Path(found.python("import bertkit, json; print(json.dumps(bertkit.__file__))"))
    assert imported.is_relative_to(site)
    assert not tmp_path.is_relative_to(ROOT)
    return found


@pytest.fixture
def published(tokenizer: Tokenizer, person: Person) -> None:
    """A small BERT that somebody gave to the person, as the folder `bert`."""
    torch.manual_seed(0)
    config = tiny_config(tokenizer, initializer_range=0.1)
    save_model(person.folder / "bert", PretrainingModel(config), tokenizer, {})


# The analyst --------------------------------------------------------------------------------------

TICKETS = [
    (f"T-{i:03}", f'The {first} "{WORDS[2 + i % 6]}", they\nsaid, {WORDS[8 + i % 5]}', team)
    for i in range(40)
    for first, team in [("river", "Wet, cold") if i % 2 else ("stone", 'Dry "dust"')]
]
TICKETS += [("T-100", None, "Wet, cold"), ("T-101", "river garden", None)]

ANALYSIS = """
import json
import pandas
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from bertkit import FinetuneSettings, Grid, finetune
from bertkit.sklearn import BertClassifier

tickets = pandas.read_csv("tickets.csv", index_col=0)
best = finetune(
    "classification", "bert", "runs/tickets", train=tickets,
    columns={"text": "body", "label": "team"},
    settings=FinetuneSettings(grid=Grid(batch_size=(4,), learning_rate=(5e-3,), epochs=(6,))),
)
whole = tickets.dropna()
model = make_pipeline(
    FunctionTransformer(lambda texts: texts.str.replace("\\n", " ")),
    BertClassifier("bert", epochs=8, batch_size=4, learning_rate=5e-3),
)
folds = cross_val_score(model, whole["body"], whole["team"], cv=2)
print(json.dumps([best.scores["dev"]["accuracy"], list(folds)]))
"""


@pytest.mark.usefixtures("published")
def test_an_analyst_with_a_table(person: Person) -> None:
    columns = ["ticket", "body", "team"]
    index = [i % 5 for i in range(len(TICKETS))]
    pandas = pytest.importorskip("pandas")
    tickets = pandas.DataFrame(TICKETS, columns=columns, index=index)
    tickets.to_csv(person.folder / "tickets.csv")
    accuracy, folds = person.python(ANALYSIS)
    assert accuracy == 1
    assert np.mean(folds) > 0.9

    person.bertkit("evaluate runs/tickets tickets.csv --out scores")
    evaluated = person.json("scores/tickets-scores.json")
    assert (evaluated["scores"]["accuracy"], evaluated["scored"]) == (1, len(TICKETS) - 2)

    tickets.drop(columns="team").to_csv(person.folder / "new.csv", index=False)
    person.bertkit("predict runs/tickets new.csv --out predictions.csv")
    found = person.table("predictions.csv")[["ticket", "label", "probability"]]
    joined = tickets.merge(found, on="ticket", how="left", validate="1:1")
    assert list(joined["ticket"]) == [ticket for ticket, _, _ in TICKETS]
    assert list(joined[joined["label"].isna()]["ticket"]) == ["T-100"]
    known = joined.dropna()
    assert len(known) == len(TICKETS) - 2
    assert (known["label"] == known["team"]).all()
    assert known["probability"].between(0.5, 1).all()

    card = ModelCard(new_card(person.folder / "runs/tickets/model", "org/tickets"))
    assert card.data.library_name == "transformers"
    assert blocks(card.content, "python")


# The engineer -------------------------------------------------------------------------------------

RECIPE = """
[model]
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 48
[phases]
lengths = [48]
steps = [STEPS]
batch_sizes = [4]
max_predictions = [7]
[training]
learning_rate = 2e-3
warmup_steps = 5
[logging]
log_every = 10
held_out_sequences = 8
"""
STEPS = 120


def steps_of(journal: Path) -> list[int]:
    """The updates that the journal records."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]


def write_corpus(folder: Path) -> None:
    """Files of sixteen documents each; the last document of every file is the same."""
    rng = np.random.default_rng(0)
    documents = [make_document(rng, int(rng.integers(5, 30))) for _ in range(61)]
    folder.mkdir()
    for i in range(4):
        chosen = [*documents[i * 15 : i * 15 + 15], documents[-1]]
        (folder / f"part-{i}.txt").write_text("\n\n".join(chosen) + "\n")


@contextmanager
def serving(person: Person, line: str) -> Iterator[str]:
    """The address of a server, which ends by SIGTERM."""
    with person.start(*person.bertkit_words(line)) as process:
        try:
            printed = iter(process.stdout.readline, "")
            address = next((one.split()[2] for one in printed if "serving at" in one), "")
            assert address, process.stderr.read()
            yield address.rstrip(",")
            process.send_signal(signal.SIGTERM)
            finish(process, -signal.SIGTERM)
        finally:
            process.kill()


def test_an_engineer_with_a_private_corpus(person: Person) -> None:
    write_corpus(person.folder / "corpus")
    person.bertkit("clean corpus --near --processes 1 --out clean.jsonl.zst")
    person.bertkit("learn clean.jsonl.zst --size 150 --processes 1 --out tokenizer")
    person.bertkit(
        "prepare clean.jsonl.zst --tokenizer tokenizer --held-out 0.1 --processes 1 --out store"
    )
    (person.folder / "mine.toml").write_text(RECIPE.replace("STEPS", str(STEPS)))
    command = "pretrain mine.toml --store store --out runs/mine"
    journal = person.folder / "runs/mine/journal.jsonl"
    running = person.start(*person.bertkit_words(command))
    while not steps_of(journal):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    finish(running, 130)
    stopped = steps_of(journal)
    assert stopped[-1] < STEPS
    person.bertkit(command)
    steps = steps_of(journal)
    assert steps[: len(stopped)] == stopped
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS

    assert "<svg" in (person.folder / "runs/mine/report.html").read_text()
    rows = [f"{word} {WORDS[i]},{'a' if i % 2 else 'b'}" for i, word in enumerate(WORDS[20:] * 2)]
    (person.folder / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    person.bertkit(
        "finetune classification --train train.csv --model runs/mine --out runs/topics "
        "--epochs 1 --batch-size 8 --learning-rate 1e-3"
    )
    (person.folder / "new.txt").write_text("The sailor is in the garden.\n")
    person.bertkit("predict runs/topics new.txt --out new.jsonl --precision fp32")
    scored = person.json("new.jsonl")["probabilities"]
    (person.folder / "token").write_text("secret\n")
    with serving(person, "serve runs/topics runs/mine --port 0 --token-file token") as address:
        inputs = {"model": "topics", "inputs": [{"text": "The sailor is in the garden."}]}
        bearer = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{address}/").status_code == 200
        assert httpx.post(f"{address}/v1/classification", json=inputs).status_code == 401
        answer = httpx.post(f"{address}/v1/classification", json=inputs, headers=bearer).json()
    found = answer["predictions"][0]["probabilities"]
    assert found == pytest.approx(scored, abs=1e-2)


# The user of transformers -------------------------------------------------------------------------

TRAINING = """
import json
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForMaskedLM, BertTokenizer,
)
from bertkit import FinetuneSettings, Grid, finetune, load

words = "my parcel has not arrived where is the box i was charged twice card refused".split()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(special + words)})
torch.manual_seed(0)
config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=48, initializer_range=0.1,
)
model = BertForMaskedLM(config).eval()
model.save_pretrained("theirs")
tokenizer.save_pretrained("theirs")
with torch.no_grad():
    logits = model(**tokenizer("where is [MASK] box", return_tensors="pt")).logits
best_filled = logits[0, 3].softmax(-1).max().item()

filled = load("theirs", precision="fp32").fill_mask("where is [MASK] box", top=1)[0][0].probability
rows = Dataset.from_dict({
    "text": ["my parcel has not arrived", "where is the box", "i was charged", "card refused"] * 6,
    "label": ["delivery", "delivery", "payment", "payment"] * 6,
})
best = finetune(
    "classification", "theirs", "runs/topics", train=rows, dev=rows,
    settings=FinetuneSettings(grid=Grid(batch_size=(4,), learning_rate=(5e-3,), epochs=(6,))),
)
texts = ["where is my parcel", "twice charged i was"]
tokenizer = AutoTokenizer.from_pretrained("runs/topics/model")
model = AutoModelForSequenceClassification.from_pretrained("runs/topics/model").eval()
with torch.no_grad():
    logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
named = [dict(zip(model.config.id2label.values(), row, strict=True))
         for row in logits.softmax(-1).tolist()]
ours = load("runs/topics", precision="fp32")(texts)
print(json.dumps([filled - best_filled, best.scores["dev"]["accuracy"], named,
                  [dict(found.probabilities) for found in ours]]))
"""
FROM_HUB = """
import json
import bertkit

found = bertkit.load("org/topics", precision="fp32")("where is my parcel")
print(json.dumps(dict(found.probabilities)))
"""


def test_a_user_of_transformers(person: Person) -> None:
    difference, accuracy, theirs, ours = person.python(TRAINING)
    assert abs(difference) < 1e-5
    assert accuracy == 1
    for one, other in zip(theirs, ours, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    with running_hub() as hub:
        person.environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token}
        person.environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        person.bertkit("push runs/topics org/topics")
        card = hub.repositories["org/topics"].files["README.md"].decode()
        assert ModelCard(card).data.library_name == "transformers"
        assert person.python(FROM_HUB) == pytest.approx(ours[0], abs=1e-6)
