"""Hidden states of texts, against transformers, and the command that writes them."""

from __future__ import annotations

import copy
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from bertkit.predict.text_vectors import read_lines
from safetensors.numpy import load_file

from bertkit.cli.app import main
from bertkit.errors import NOT_FINITE, BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.features import FeatureModel, save_with_head
from bertkit.predict.features import Extraction, extract
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import load_encoder, run, tiny_config

Write = Callable[[str, str], Path]
TEXTS = ["River stone, meadow.", "", "walking zebra", "x" * 30, "lantern\t\u200b"]
LONG = "river meadow stone walking lantern " * 12


@pytest.fixture(scope="module")
def encoder(pretrained: Path) -> Encoder:
    return load_encoder(pretrained)


@pytest.fixture(scope="module")
def oracle(pretrained: Path) -> Callable[[list[int]], Any]:
    """Hidden states of ids, by transformers: embeddings first."""
    model = transformers.BertModel.from_pretrained(pretrained).eval()

    def states(ids: list[int]) -> list[np.ndarray]:
        with torch.no_grad():
            found = model(torch.tensor([ids]), output_hidden_states=True)
        return [state[0].numpy() for state in found.hidden_states]

    return states


def surrounded(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [tokenizer.cls_id, *ids, tokenizer.sep_id]


@pytest.mark.parametrize("layers", ["embeddings", "second-to-last", "last", "sum"])
def test_tokens_equal_transformers(
    encoder: Encoder, tokenizer: Tokenizer, oracle: Any, layers: str
) -> None:
    found = list(extract(encoder, tokenizer, TEXTS, Extraction(layers=layers)))
    assert len(found) == len(TEXTS)
    for text, features in zip(TEXTS, found, strict=True):
        encoding = tokenizer.encode(text)
        states = oracle(surrounded(tokenizer, encoding.ids))
        named = {"embeddings": 0, "second-to-last": -2, "last": -1}
        wanted = sum(states[1:]) if layers == "sum" else states[named[layers]]
        np.testing.assert_allclose(features.vectors, wanted, atol=2e-5)
        assert features.tokens == ["[CLS]", *encoding.tokens, "[SEP]"]
        assert features.offsets == [(0, 0), *encoding.offsets, (0, 0)]
        assert (features.vectors.dtype, features.windows) == (np.float32, 1)


def test_pooling(encoder: Encoder, tokenizer: Tokenizer) -> None:
    texts = [*TEXTS, LONG]
    tokens = list(extract(encoder, tokenizer, texts))
    pooled = {
        name: list(extract(encoder, tokenizer, texts, Extraction(pooling=name)))
        for name in ("cls", "mean")
    }
    for n, features in enumerate(tokens):
        assert pooled["cls"][n].vectors.shape == (1, 32)
        assert pooled["cls"][n].tokens == []
        np.testing.assert_array_equal(pooled["cls"][n].vectors[0], features.vectors[0])
        np.testing.assert_allclose(
            pooled["mean"][n].vectors[0], features.vectors.mean(0), atol=1e-6
        )


def test_long_texts_lose_nothing(encoder: Encoder, tokenizer: Tokenizer, oracle: Any) -> None:
    """Windows of 10 pieces that share 4: each piece from the one where it is most central."""
    [features] = extract(encoder, tokenizer, [LONG], Extraction(max_length=12, stride=6))
    ids = tokenizer.encode(LONG).ids
    assert len(features.vectors) == len(features.tokens) == len(ids) + 2
    starts = [*range(0, len(ids) - 10, 6), len(ids) - 10]
    assert features.windows == len(starts)
    windows = [oracle(surrounded(tokenizer, ids[start : start + 10]))[-1] for start in starts]
    for piece in range(len(ids)):
        contexts = [min(piece - s, s + 9 - piece) for s in starts]
        best = int(np.argmax(contexts))
        wanted = windows[best][1 + piece - starts[best]]
        np.testing.assert_allclose(features.vectors[1 + piece], wanted, atol=2e-5)
    for row in (0, -1):
        mean = np.mean([window[row] for window in windows], axis=0)
        np.testing.assert_allclose(features.vectors[row], mean, atol=2e-5)


def test_texts_come_one_after_the_other(
    encoder: Encoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is computed as soon as it is full, and batches change nothing."""
    whole = list(extract(encoder, tokenizer, [*TEXTS, LONG] * 3))
    monkeypatch.setattr("bertkit.tasks.task.PREDICTION_TOKENS", 30)
    read = []

    def texts() -> Iterator[str]:
        for text in [*TEXTS, LONG] * 3:
            read.append(text)
            yield text

    found = extract(encoder, tokenizer, texts())
    first = next(found)
    assert len(read) < 6
    for one, other in zip([first, *found], whole, strict=True):
        np.testing.assert_allclose(one.vectors, other.vectors, atol=1e-5)


def test_precision_and_dtype(encoder: Encoder, tokenizer: Tokenizer) -> None:
    [exact] = extract(encoder, tokenizer, TEXTS[:1])
    [half] = extract(encoder, tokenizer, TEXTS[:1], Extraction(dtype="float16"))
    [low] = extract(encoder, tokenizer, TEXTS[:1], precision="bf16")
    assert half.vectors.dtype == np.float16
    np.testing.assert_array_equal(half.vectors, exact.vectors.astype(np.float16))
    assert not np.array_equal(low.vectors, exact.vectors)
    np.testing.assert_allclose(low.vectors, exact.vectors, atol=0.1)


def test_bad_requests(encoder: Encoder, tokenizer: Tokenizer) -> None:
    def fails(message: str, **changes: Any) -> None:
        with pytest.raises(BertkitError, match=message):
            list(extract(encoder, tokenizer, TEXTS, Extraction(**changes)))

    fails("--pooling cannot be 'token'; did you mean 'tokens'", pooling="token")
    fails("--dtype cannot be 'float64'", dtype="float64")
    fails("did you mean 'last'", layers="lst")
    fails("needs 4 layers", layers="concat-last-four")
    fails("weights of 'weighted-sum' are learned", layers="weighted-sum")
    fails("windows of 41 tokens do not fit the model's 40 positions", max_length=41)
    fails("windows of 2 tokens", max_length=2)
    fails("--stride 40 must be below the 40 tokens", stride=40)


def test_command(
    pretrained: Path, encoder: Encoder, tokenizer: Tokenizer, write: Write, capsys: Any
) -> None:
    text = write("some.txt", f"river stone\n\n{LONG}\n")
    out = text.with_name("f.npy")
    run("features", pretrained, text, "--out", out, "--layers", "sum")
    said = capsys.readouterr().err
    assert "3 texts" in said
    assert "1 in several windows, 0 cut, inputs without a known token: 1" in said
    assert "empty text, kept: 1" in said
    wanted = extract(encoder, tokenizer, ["river stone", "", LONG], Extraction(layers="sum"))
    vectors = np.concatenate([found.vectors for found in wanted])
    np.testing.assert_allclose(np.load(out), vectors, atol=1e-5)


def test_columns(pretrained: Path, write: Write, capsys: Any) -> None:
    def run(file: Path, *more: str) -> Any:
        out = file.with_name("f.safetensors")
        with pytest.raises(SystemExit) as end:
            main(["features", str(pretrained), str(file), "--out", str(out), *more])
        return end.value.code, capsys.readouterr().err

    rows = write("rows.jsonl", '{"body": "river"}\n{"body": null}\n{"body": 7}\n')
    code, said = run(rows, "--column", "body", "--pooling", "cls")
    assert (code, len(load_file(rows.with_name("f.safetensors")))) == (0, 3)
    code, said = run(rows)
    assert code == 2
    assert "column 'text'" in said
    lists = write("lists.jsonl", '{"tokens": NaN}\n{"tokens": ["river", "stone"]}\n')
    code, said = run(lists, "--column", "tokens")
    assert code == 2
    assert "lists.jsonl:2: 'tokens' holds \"['river', 'stone']\", which is not text" in said
    code, said = run(write("bad.csv", "id,text\n1,river\n2,stone,x\n3,x\n"))
    assert code == 2
    assert "bad.csv:3" in said
    code, said = run(rows, "--column", "body", "--layers", "weighted-sum")
    assert code == 2
    assert "are learned" in said


@pytest.mark.parametrize("name", ["a.txt.gz", "b.txt.gz"])
def test_damaged_text_is_named(pretrained: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    """Of a truncated file and of one with a wrong checksum."""
    whole = gzip.compress(b"river stone\n" * 9000)
    wrong = whole[:-8] + bytes(4) + whole[-4:]
    text = tmp_path / name
    text.write_bytes(whole[:-9] if name == "a.txt.gz" else wrong)
    out = tmp_path / "f.npy"
    for verb in (["features"], ["predict", "embed"]):
        run(*verb, pretrained, text, "--out", out, "--pooling", "mean", status=2)
        assert f"{text} cannot be read after line" in capsys.readouterr().err
        assert not out.exists()


@pytest.mark.parametrize("other", ["a.md", "z.md"])
def test_files_of_unknown_type_are_counted(tmp_path: Path, other: str) -> None:
    """Wherever their names stand among those that are read."""
    (tmp_path / "c.csv").write_text("text\nriver\n")
    (tmp_path / "d.txt").write_text("stone")
    (tmp_path / other).write_text("x")
    counts = TextCounts()
    assert list(read_lines(str(tmp_path), "text", counts)) == ["river", "stone"]
    assert counts.skipped == {"file of unknown type": 1}


def test_weights_of_a_tuned_model(tokenizer: Tokenizer, write: Write, capsys: Any) -> None:
    torch.manual_seed(0)
    config = tiny_config(tokenizer, hidden_size=8, intermediate_size=8, max_position_embeddings=512)
    model = FeatureModel(config, 2, "weighted-sum", "linear").eval()
    assert model.mix is not None
    torch.nn.init.normal_(model.mix)
    text = write("some.txt", "river stone")
    folder = text.with_name("model")
    save_with_head(
        folder, model, tokenizer, {"task": "token-classification", "labels": ["O", "B-X"]}
    )
    out = text.with_name("f.npy")
    run("features", folder, text, "--out", out, "--layers", "weighted-sum")
    [wanted] = extract(
        model.encoder,
        tokenizer,
        ["river stone"],
        Extraction(layers="weighted-sum"),
        mix=model.mix.detach(),
    )
    np.testing.assert_allclose(np.load(out), wanted.vectors, atol=1e-6)
    assert "1 texts" in capsys.readouterr().err


def test_states_that_are_no_numbers_are_refused(encoder: Encoder, tokenizer: Tokenizer) -> None:
    changed = copy.deepcopy(encoder)
    with torch.no_grad():
        changed.layers[-1].output_norm.weight.fill_(1e5)
    list(extract(changed, tokenizer, TEXTS[:1]))
    with pytest.raises(BertkitError, match="--dtype float32") as raised:
        list(extract(changed, tokenizer, TEXTS[:1], Extraction(dtype="float16")))
    assert raised.value.code == NOT_FINITE
    with torch.no_grad():
        changed.layers[-1].output_norm.weight.fill_(3e38)
    with pytest.raises(BertkitError) as raised:
        list(extract(changed, tokenizer, TEXTS[:1]))
    assert raised.value.code == NOT_FINITE
