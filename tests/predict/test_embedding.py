from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.sentence_transformers import TextPooling, read_pooling
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.native import possible_modes
from bertkit.predict import embeddings as embedding
from bertkit.predict.embeddings import Embedder, load_embedder
from bertkit.predict.features import extract
from bertkit.tasks import sequences as engine
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import ORACLES, load_encoder, tiny_config
from tests.networks import write_pooling

TEXTS = ["River stone, meadow.", "", "walking slowly", "copper thread market " * 9, "lantern"]
LONG = TEXTS[3]


@pytest.fixture(scope="module")
def directory(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = tiny_config(
        tokenizer, num_hidden_layers=4, max_position_embeddings=24, initializer_range=0.3
    )
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(folder, Encoder(config), tokenizer, {"task": "features"})
    return folder


def load(directory: Path, pooling: str = "auto", normalize: bool | None = False) -> Embedder:
    return load_embedder(
        directory, device="cpu", precision="fp32", pooling=pooling, normalize=normalize
    )


def test_the_mean_is_that_of_features_also_over_windows(directory: Path) -> None:
    embedder = load(directory)
    wanted = extract(load_encoder(directory), embedder.tokenizer, TEXTS)
    expected = np.stack([text.vectors.mean(axis=0) for text in wanted])
    assert len(embedder.tokenize([LONG])[0].parts) > 1
    np.testing.assert_allclose(embedder.encode(TEXTS), expected, atol=2e-6)


def test_poolings_are_what_they_say(directory: Path) -> None:
    encoder, embedder = load_encoder(directory), load(directory)
    [text] = embedder.tokenize(["River stone, meadow."])
    from bertkit.pretraining_data.batch import pack

    with torch.no_grad():
        states = encoder.layers_of(pack([text.parts[0].sequences[0].ids.tolist()]))
        expected = {
            "cls": states[-1][0],
            "mean": states[-1].mean(0),
            "pooler": encoder.pool(states[-1][:1])[0],
            "lasttoken+max": torch.cat([states[-1][-1], states[-1].max(0).values]),
        }
    for pooling, vector in expected.items():
        [found] = load(directory, pooling).encode(["River stone, meadow."])
        np.testing.assert_allclose(found, vector, atol=2e-6, err_msg=pooling)


def test_the_summary_of_a_long_text_is_the_weighted_mean_of_its_windows(directory: Path) -> None:
    embedder = load(directory, "cls")
    [text] = embedder.tokenize([LONG])
    shares = [part.target for part in text.parts]
    assert sum(shares) == pytest.approx(1)
    assert len(set(shares)) > 1
    alone = [part._replace(target=1.0) for part in text.parts]
    rows = [embedder.vectors([embedding.EncodedText([part])])[0] for part in alone]
    expected = sum(share * row for share, row in zip(shares, rows, strict=True))
    np.testing.assert_allclose(embedder.encode([LONG])[0], expected, atol=2e-6)


@pytest.mark.slow
def test_concatenated_poolings_are_those_alone_also_over_windows(directory: Path) -> None:
    pooling = "cls+lasttoken+mean+max+mean_sqrt_len+weightedmean"
    alone = {mode: load(directory, mode).encode(TEXTS) for mode in pooling.split("+")}
    found = load(directory, pooling).encode(TEXTS)
    np.testing.assert_allclose(found, np.concatenate([*alone.values()], axis=1), atol=2e-6)
    tokens = [len(load(directory).tokenizer.encode(text).ids) + 2 for text in TEXTS]
    scaled = alone["mean"] * np.sqrt(tokens)[:, None]
    np.testing.assert_allclose(alone["mean_sqrt_len"], scaled, atol=2e-5)
    with pytest.raises(BertkitError, match="pooler"):
        load(directory, "mean+pooler")


@pytest.mark.slow
@given(order=st.permutations(range(len(TEXTS))), threads=st.sampled_from([1, 2]))
@settings(max_examples=10, deadline=None)
def test_order_company_and_threads_change_nothing(
    order: list[int], threads: int, directory: Path
) -> None:
    embedder = load(directory)
    before, engine.LEAST_TOKENS = engine.LEAST_TOKENS, 1
    torch.set_num_threads(threads)  # after loading
    try:
        found = embedder.encode([TEXTS[i] for i in order])
        assert torch.get_num_threads() == threads
    finally:
        engine.LEAST_TOKENS = before
        torch.set_num_threads(1)
    np.testing.assert_allclose(found, alone_vectors(directory)[order], atol=2e-6)


@cache
def alone_vectors(directory: Path) -> np.ndarray:
    """The vector of each text by a model that has read no other."""
    return np.concatenate([load(directory).encode([text]) for text in TEXTS])


def test_cutting_is_asked_for(directory: Path) -> None:
    embedder = load(directory)
    [cut] = embedder.tokenize([LONG], windows=False)
    assert (len(cut.parts), cut.tokens) == (1, embedder.max_length)
    shorter = embedder.tokenizer.encode(LONG)
    prefix = LONG[: shorter.offsets[embedder.max_length - 3][1]]
    np.testing.assert_allclose(
        embedder.encode([LONG], windows=False), embedder.encode([prefix]), atol=1e-6
    )
    assert not np.allclose(
        embedder.encode([LONG]), embedder.encode([LONG], windows=False), atol=1e-3
    )


def test_vectors_have_length_one_unless_asked(directory: Path) -> None:
    unit = load(directory, normalize=None).encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    raw = load(directory).encode(TEXTS)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-6)
    assert load(directory).encode([]).shape == (0, 32)
    np.testing.assert_array_equal(
        load(directory).encode(TEXTS[0]), load(directory).encode(TEXTS[:1])[0]
    )


def edit(folder: Path, name: str, change: Callable[[dict[str, object]], object]) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    change(content)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def test_directories_of_sentence_transformers_say_how_they_pool(
    directory: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = load_encoder(directory).config
    save_model(tmp_path / "m", load_encoder(directory), tokenizer, {"task": "features"})
    said = TextPooling("cls", normalize=False, max_length=20, prompt="river ")
    write_pooling(tmp_path / "m", said, config)
    assert read_pooling(tmp_path / "m") == (tmp_path / "m", said)
    prompted = load(tmp_path / "m", normalize=None).encode(["stone"])
    np.testing.assert_allclose(prompted, load(directory, "cls").encode(["river stone"]), atol=1e-6)
    edit(tmp_path / "m", "1_Pooling/config.json", lambda c: c.update(pooling_mode="sum"))
    with pytest.raises(BertkitError, match=r"config\.json: pooling by sum is not supported"):
        load(tmp_path / "m")
    for wrong in (5, [{}], {"a": 1}):
        edit(tmp_path / "m", "1_Pooling/config.json", lambda c, w=wrong: c.update(pooling_mode=w))
        with pytest.raises(BertkitError, match="is not supported"):
            load(tmp_path / "m")
    (tmp_path / "m" / "1_Pooling" / "config.json").unlink()
    with pytest.raises(BertkitError, match=r"config.json"):
        load(tmp_path / "m")
    assert load(tmp_path / "m", "mean").settings == replace(said, pooling="mean")
    cnn = [{"type": f"a.{name}", "path": ""} for name in ("Transformer", "Pooling", "CNN")]
    (tmp_path / "m" / "modules.json").write_text(json.dumps(cnn))
    with pytest.raises(BertkitError, match=r"modules\.json: CNN is missing or not supported"):
        load(tmp_path / "m")
    assert load(tmp_path / "m", "cls").settings == said
    (tmp_path / "m" / "modules.json").write_text("{}")
    with pytest.raises(BertkitError, match=r"modules\.json: Pooling is missing or not supported"):
        load(tmp_path / "m")


def test_a_table_is_not_taken_for_the_names_of_its_columns(directory: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": ["river", "stone"], "number": [1, 2]})
    with pytest.raises(TypeError, match="or the column of a table that has them, not"):
        load(directory).encode(table)
    wanted = load(directory).encode(["river", "stone"])
    np.testing.assert_array_equal(load(directory).encode(table["text"]), wanted)


@pytest.fixture(scope="module")
def real_texts(data: Path) -> list[str]:
    lines = (data / "glue/STS-B/dev.tsv").read_text().splitlines()[1:41]
    sentences = [sentence for line in lines for sentence in line.split("\t")[7:9]]
    return ["", *sentences, " ".join(sentences)]


@ORACLES
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_genuine_weights_equal_sentence_transformers(minilm: Path, real_texts: list[str]) -> None:
    """Cosine 0.99999 in fp32, also of a text that is cut, and close in bf16 and int8."""
    library = pytest.importorskip("sentence_transformers")
    expected = library.SentenceTransformer(str(minilm), device="cpu").encode(real_texts)
    exact = load_embedder(minilm, device="cpu", precision="fp32")
    assert (exact.max_length, exact.width) == (256, 384)
    found = exact.encode(real_texts, windows=False)
    assert len(exact.tokenize(real_texts[-1:])[0].parts) > 1
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (found * expected).sum(axis=1).min() >= 0.99999
    np.testing.assert_array_equal(found[:-1], exact.encode(real_texts)[:-1])
    fast = {"bf16": 0.999}
    if "int8" in possible_modes():
        fast["int8"] = 0.98
    for precision, least in fast.items():
        vectors = load_embedder(minilm, device="cpu", precision=precision).encode(real_texts)
        assert (vectors * exact.encode(real_texts)).sum(axis=1).min() >= least, precision
