"""Directories of sentence-transformers, read as that library reads them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.sentence_transformers import (
    TextPooling,
)
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.predict.embeddings import Embedder, load_embedder
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.conftest import ORACLES
from tests.networks import write_pooling

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZàσς:[],."
TEXTS = ["River Stone", "A [MASK] B, [Mask] c", "ÀÉ ΣΑΣ [MASK][SEP] İx", "", "mAsk", "[mask]"]


@pytest.fixture(scope="module")
def cased() -> Tokenizer:
    """Every letter is a piece of its own, the capitals too."""
    continuations = [f"##{letter}" for letter in LETTERS if letter.isalpha()]
    vocabulary = [*SPECIAL_TOKENS, *LETTERS, *continuations]
    return Tokenizer.from_vocabulary(vocabulary, lowercase=False)


def write(folder: Path, tokenizer: Tokenizer, pooling: TextPooling, **changes: Any) -> Path:
    """A directory of sentence-transformers with random weights."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=48,
        initializer_range=0.3,
        **changes,
    )
    save_model(folder, Encoder(config), tokenizer, {"task": "embedding"})
    write_pooling(folder, pooling, config)
    return folder


def pool_by(folder: Path, mode: str) -> None:
    """Change the mode of a directory."""
    settings = {"pooling_mode": mode, "word_embedding_dimension": 32}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def own(folder: Path, pooling: str = "auto") -> Embedder:
    return load_embedder(folder, device="cpu", precision="fp32", pooling=pooling)


def theirs(folder: Path, texts: list[str]) -> np.ndarray:
    """What sentence-transformers makes of the same directory."""
    library = pytest.importorskip("sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.SentenceTransformer(str(folder), device="cpu").encode(texts)


def test_a_token_that_sees_no_other_is_refused(cased: Tokenizer, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", cased, TextPooling("cls"), direction="left_to_right")
    assert json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_lasttoken"]
    assert own(folder).settings.pooling == "cls"
    pool_by(folder, "cls")
    with pytest.raises(BertkitError, match="pooling by cls is not"):
        own(folder)
    assert own(folder, "mean").settings.pooling == "mean"


@ORACLES
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("direction", ["left_to_right", "bidirectional"])
def test_every_mode_equals_sentence_transformers_or_is_refused(
    direction: str, cased: Tokenizer, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", cased, TextPooling("mean"), direction=direction)
    modes = ["mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
    modes += [] if direction == "left_to_right" else ["cls"]
    for mode in (*modes, modes[::-1], modes[-2:]):
        pool_by(folder, mode)
        found = own(folder).encode(TEXTS)
        np.testing.assert_allclose(found, theirs(folder, TEXTS), atol=1e-5, err_msg=str(mode))
    flags = {f"pooling_mode_{name}": True for name in ("mean_tokens", "max_tokens", "lasttoken")}
    settings = json.dumps({"word_embedding_dimension": 32, **flags})
    (folder / "1_Pooling" / "config.json").write_text(settings)
    assert own(folder).width == 96
    np.testing.assert_allclose(own(folder).encode(TEXTS), theirs(folder, TEXTS), atol=1e-5)


@ORACLES
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modules_after_the_pooling_are_computed(cased: Tokenizer, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    kinds = library.sentence_transformer.modules
    folder = write(tmp_path / "m", cased, TextPooling("mean", normalize=False))
    pool_by(folder, ["cls", "mean"])
    model = library.SentenceTransformer(str(folder), device="cpu")
    first, last = kinds.Dense(64, 24), kinds.Dense(24, 8, False, torch.nn.GELU())
    norm = kinds.LayerNorm(24)
    torch.nn.init.normal_(norm.norm.weight)
    several = [kinds.Dropout(0.5), first, norm, kinds.Normalize(), last]
    for number, after in enumerate(([first], [*several, kinds.Normalize()], several)):
        made = library.SentenceTransformer(modules=[*model, *after], device="cpu")
        made.save(str(tmp_path / str(number)))
        found = own(tmp_path / str(number))
        expected = made.eval().encode(TEXTS)
        assert found.width == expected.shape[1] == (24, 8, 8)[number]
        np.testing.assert_allclose(found.encode(TEXTS), expected, atol=1e-5)
        long = found.encode(["River Stone " * 30])
        assert long.shape == (1, found.width)
        if number == 1:
            np.testing.assert_allclose(np.linalg.norm(long), 1.0, atol=1e-6)
    assert own(tmp_path / "1", "cls").width == 32, "the encoder alone"
    dense = tmp_path / "0" / "2_Dense" / "config.json"
    for change in (
        {"activation_function": "os.system"},
        {"in_features": 8},
        {"use_residual": True},
    ):
        dense.write_text(json.dumps(json.loads(dense.read_text()) | change))
        with pytest.raises(BertkitError, match="2_Dense"):
            own(tmp_path / "0")


def test_settings_of_an_earlier_version_are_read(cased: Tokenizer, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", cased, TextPooling())
    (folder / "modules.json").unlink()
    details = {"task": "embedding", "embedding": {"pooling": "pooler", "lowercase": False}}
    (folder / "bertkit.json").write_text(json.dumps(details))
    assert own(folder).settings == TextPooling("pooler", max_length=48)


def test_lower_case_for_a_cased_tokenizer_is_refused(cased: Tokenizer, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", cased, TextPooling("mean", prompt="Query: "))
    assert own(folder).settings.prompt == "Query: "
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(BertkitError, match=r"lowercases texts for a cased tokenizer"):
        own(folder)
