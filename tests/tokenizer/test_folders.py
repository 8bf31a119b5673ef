"""Folders of tokenizers: bertkit and transformers read each other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.tokenizer.wordpiece import Tokenizer

TEXTS = ["The river, the harbour!", "Ångström 漢字 [MASK]", "", "walking \u200b slowly"]


@pytest.mark.parametrize("lowercase", [True, False])
def test_transformers_reads_what_is_saved(
    lowercase: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
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
