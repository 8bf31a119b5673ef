"""Folders of tokenizers: bertkit and transformers read each other's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import BertkitError
from bertkit.tokenizer.wordpiece import Tokenizer

TEXTS = ["The river, the harbour!", "Ångström 漢字 [MASK]", "", "walking \u200b slowly"]


@pytest.mark.parametrize("lowercase", [True, False])
def test_transformers_reads_what_is_saved(
    lowercase: bool, tokenizer: Tokenizer, tmp_path: Path, transformers: Any
) -> None:
    own = Tokenizer.from_vocabulary(tokenizer.vocabulary, lowercase=lowercase)
    own.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.content_hash == own.content_hash
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = own.encode(text).ids
        assert again.encode(text).ids == ids
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BertkitError):
        Tokenizer.load(tmp_path / "absent")
    (tmp_path / "vocab.txt").write_text("[PAD]\nword\n")
    with pytest.raises(BertkitError, match="UNK"):
        Tokenizer.load(tmp_path)


def test_a_token_that_cannot_be_written_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """JSON can hold half of a surrogate pair, UTF-8 cannot."""
    tokenizer.save(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {
        "\ud800" if number == 50 else token: number for token, number in vocabulary.items()
    }
    path.write_text(json.dumps(content))
    with pytest.raises(BertkitError, match=r"tokenizer\.json.*surrogate"):
        Tokenizer.load(tmp_path)


def test_texts_that_are_joined_in_another_way_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    config, pipeline = tmp_path / "tokenizer_config.json", tmp_path / "tokenizer.json"
    config.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert Tokenizer.load(tmp_path).content_hash == tokenizer.content_hash
    content = json.loads(pipeline.read_text())
    content["post_processor"]["pair"][-1]["SpecialToken"]["type_id"] = 0
    pipeline.write_text(json.dumps(content))
    with pytest.raises(BertkitError, match="post_processor"):
        Tokenizer.load(tmp_path)
    config.write_text('{"tokenizer_class": "BertTokenizer"}')
    assert Tokenizer.load(tmp_path).content_hash == tokenizer.content_hash
