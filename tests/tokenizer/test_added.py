"""Added tokens: those of transformers, in every layout of its files, give the same ids."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from bertkit.errors import BertkitError
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

pytestmark = pytest.mark.usefixtures("transformers")

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZéï@<>[]#:/.漢"
VOCABULARY = [
    *(*SPECIAL_TOKENS, "[unused5]", "[E1]", "url", "##des", "order", *LETTERS),
    *(f"##{letter}" for letter in LETTERS if letter.isalpha()),
]
ADDED = [
    *(AddedToken("remdesivir"), AddedToken("@User"), AddedToken("<url>"), AddedToken("##x")),
    AddedToken("New York", single_word=True),
    AddedToken("naïve", normalized=False, lstrip=True),
    AddedToken("Éa", rstrip=True),
    *(AddedToken("漢字"), AddedToken("a.b"), AddedToken("@"), AddedToken("url", single_word=True)),
]
SPECIAL = ["[ORDER]", "[unused5]", "[E1]"]
TEXTS = [
    *(token.content for token in ADDED),
    *(*SPECIAL, "[MASK]", "[order]", "REMDÉSIVIR", "rem\u200bdesivir", "rem\ud800desivir", "@user"),
    *("naive", "e\u0301a", "new\u00a0york", "New  York", "\u0315\u0300", " ", "  ", "\n", "x", "s"),
    *("漢 字", "a . b", "\x00", "İ", "ß", "[", "]", "[E1", "\u3000", "##", "url"),
]


def write_layout(layout: str, folder: Path, *, lowercase: bool) -> None:
    """Files of a tokenizer with added tokens, as different versions of transformers write them."""
    from transformers import BertTokenizer

    plain = folder / "plain"
    Tokenizer.from_vocabulary(VOCABULARY, lowercase=lowercase).save(plain)
    theirs = BertTokenizer.from_pretrained(plain)
    theirs.add_tokens(ADDED)
    theirs.add_special_tokens({"extra_special_tokens": SPECIAL})
    theirs.save_pretrained(folder)
    if layout == "tokenizer.json":
        return
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    config: dict[str, Any] = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase}
    decoder = theirs.added_tokens_decoder.items()
    if layout == "decoder":
        states = {str(number): token.__getstate__() for number, token in decoder}
        config["added_tokens_decoder"] = states
    else:
        new = {token.content: n for n, token in decoder if n >= len(VOCABULARY)}
        (folder / "added_tokens.json").write_text(json.dumps(new))
        special = json.dumps({"additional_special_tokens": SPECIAL, "mask_token": "[MASK]"})
        (folder / "special_tokens_map.json").write_text(special)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def assert_same(own: Tokenizer, folder: Path) -> None:
    """Ids and offsets are those of transformers for hostile texts, one at a time and together."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == own.size
    draw = random.Random(0)
    texts = ["".join(draw.choices(TEXTS, k=draw.randint(1, 8))) for _ in range(1500)]
    readable = [text.replace("\ud800", "\ufffd") for text in texts]
    expected = theirs(readable, add_special_tokens=False, return_offsets_mapping=True)
    assert own.encode_batch(texts) == expected["input_ids"]
    for text, ids, offsets in zip(
        texts, expected["input_ids"], expected["offset_mapping"], strict=True
    ):
        encoding = own.encode(text)
        assert (encoding.ids, encoding.offsets) == (ids, offsets)
        assert encoding.tokens == [own.vocabulary[number] for number in ids]


@pytest.mark.slow
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("layout", ["tokenizer.json", "decoder", "legacy"])
def test_ids_are_those_of_transformers(layout: str, lowercase: bool, tmp_path: Path) -> None:
    write_layout(layout, tmp_path, lowercase=lowercase)
    own = Tokenizer.load(tmp_path)
    assert_same(own, tmp_path)
    own.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.content_hash == own.content_hash == pickle.loads(pickle.dumps(own)).content_hash
    assert_same(again, tmp_path / "again")
    if layout != "legacy":  # in which transformers takes it for an ordinary token
        ids = own.encode("x [ORDER] remdesivir").ids
        assert own.decode(ids, skip_special_tokens=True) == "x remdesivir"


def test_thousands_of_added_tokens(tmp_path: Path, transformers: Any) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcde", k=draw.randint(3, 9))) for _ in range(3000)]
    own = Tokenizer.from_vocabulary(
        VOCABULARY, lowercase=True, added=[AddedToken(word) for word in dict.fromkeys(words)]
    )
    own.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [" ".join(draw.choices([*words, "A", "x", "Éa"], k=9)) for _ in range(200)]
    assert own.encode_batch(texts) == theirs(texts, add_special_tokens=False)["input_ids"]


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_layout("legacy", tmp_path, lowercase=True)
    added = json.loads((tmp_path / "added_tokens.json").read_text())
    for change in ({"@User": added["@User"] + 1}, {"gap": 999}, {"@User": "7"}):
        (tmp_path / "added_tokens.json").write_text(json.dumps(added | change))
        with pytest.raises(BertkitError, match="added token"):
            Tokenizer.load(tmp_path)
    (tmp_path / "added_tokens.json").unlink()
    with pytest.raises(BertkitError, match=r"token '\[ORDER\]' must have the id"):
        Tokenizer.load(tmp_path)
