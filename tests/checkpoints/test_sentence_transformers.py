"""Directories of sentence-transformers, read as that library reads them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import Lowercase

from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.sentence_transformers import (
    TextPooling,
    lower,
    read_pooling,
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


def test_the_prompt_is_lowered_and_special_tokens_are_not(cased: Tokenizer, tmp_path: Path) -> None:
    said = TextPooling("mean", prompt="Query: ", lowercase=True)
    folder = write(tmp_path / "m", cased, said)
    assert read_pooling(folder)[1].lowercase
    [text] = own(folder).tokenize(["A [MASK] B [Mask]"])
    ids = text.parts[0].sequences[0].ids[1:-1].tolist()
    assert cased.decode(ids) == "query : a [MASK] b [ mask ]"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("prompt", ["", "Query: ", "SAY [MASK] "])
def test_lower_case_is_that_of_sentence_transformers(
    prompt: str, cased: Tokenizer, tmp_path: Path
) -> None:
    said = TextPooling("mean", prompt=prompt, lowercase=True)
    folder = write(tmp_path / "m", cased, said)
    np.testing.assert_allclose(own(folder).encode(TEXTS), theirs(folder, TEXTS), atol=1e-5)


KNOWN = st.characters(min_codepoint=1, max_codepoint=0x24FF, exclude_categories=["Cn", "Cs"])
"""Assigned in the Unicode of this Python: the library's is newer, and lowers letters of its own."""


@given(st.text(KNOWN, max_size=12))
@settings(max_examples=100, deadline=None)
def test_lower_case_goes_letter_by_letter(text: str) -> None:
    assert lower(text) == Lowercase().normalize_str(text)
    assert lower("ΑΣ") == "ας".replace("ς", "σ")  # where str.lower has a final sigma
