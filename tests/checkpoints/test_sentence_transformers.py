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


WRONG = [("left_to_right", "cls", "lasttoken"), ("bidirectional", "lasttoken", "cls")]


@pytest.mark.parametrize(("direction", "mode", "right"), WRONG)
def test_the_token_at_the_other_end_is_refused(
    direction: str, mode: str, right: str, cased: Tokenizer, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", cased, TextPooling("cls"), direction=direction)
    assert json.loads((folder / "1_Pooling/config.json").read_text())[
        "pooling_mode_lasttoken" if right == "lasttoken" else "pooling_mode_cls_token"
    ]
    assert own(folder).settings.pooling == "cls"
    pool_by(folder, mode)
    with pytest.raises(BertkitError, match=rf"pooling by {mode} is not"):
        own(folder)
    assert own(folder, "mean").settings.pooling == "mean"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("direction", ["left_to_right", "bidirectional"])
def test_every_mode_equals_sentence_transformers_or_is_refused(
    direction: str, cased: Tokenizer, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", cased, TextPooling("mean"), direction=direction)
    read = []
    for mode in ("cls", "lasttoken", "mean"):
        pool_by(folder, mode)
        try:
            found = own(folder).encode(TEXTS)
        except BertkitError:
            continue
        np.testing.assert_allclose(found, theirs(folder, TEXTS), atol=1e-5, err_msg=mode)
        read.append(mode)
    assert read == (["lasttoken", "mean"] if direction == "left_to_right" else ["cls", "mean"])


def test_lower_case_for_a_cased_tokenizer_is_refused(cased: Tokenizer, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", cased, TextPooling("mean", prompt="Query: "))
    assert own(folder).settings.prompt == "Query: "
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(BertkitError, match=r"lowercases texts for a cased tokenizer"):
        own(folder)
