"""What a tokenizer is made of: the rules of BERT's words, and the files of a vocabulary.

The `tokenizers` library defines the rules of transformers' `BertTokenizer` (BERT, section 3):
control characters are dropped, accents are stripped and letters are lower-cased if the model is
uncased, and white space, punctuation and ideographs end a word. It treats each character
independently, except that it orders combining marks. So a table of what becomes of each character,
which asks the library once for each, splits whole texts quickly; a text with a mark whose order
matters is left to the library.

The files are vocab.txt, tokenizer.json and tokenizer_config.json, which are read and checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import combining

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from bertkit.errors import BertkitError
from bertkit.files import check_file_size, read_object

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
MAX_WORD_CHARACTERS = 100
"""The length in characters of the longest word that is split; longer ones become [UNK]."""

MAX_FILE_BYTES = 1 << 26
"""The maximum size of vocab.txt or tokenizer.json: many times the largest published ones."""

WORDPIECE_CLASSES = frozenset(
    name + ending
    for name in ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "PreTrainedTokenizer")
    for ending in ("", "Fast")
) | {"TokenizersBackend"}
CJK_BLOCKS = (
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF)),
    *((0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F)),
)
WHITESPACE = "\t\n\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
IDEOGRAPHS = "".join(f"{chr(first)}-{chr(last)}" for first, last in CJK_BLOCKS)
MAX_TABLE_CHARACTERS = 1 << 16  # entries of a table; about 15 MB
SURROGATE = re.compile("[\ud800-\udfff]")
IN_CONTEXT = "\0"
"""Marks a character that others change; no rule produces U+0000."""


@cache
def bert_normalizer(lowercase: bool, strip_accents: bool) -> normalizers.BertNormalizer:
    """Return the library's normalizer with these settings."""
    return normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)


def character_rule(character: str, lowercase: bool, strip_accents: bool) -> str | None:
    """Return what becomes of a character in any text, with a space where a word ends.

    Returns None for the few characters whose order in a run of marks matters.
    """
    if "\ud800" <= character <= "\udfff":  # half of a pair, which the library does not take
        return ""
    normal = bert_normalizer(lowercase, strip_accents).normalize_str(character)
    if strip_accents and any(map(combining, normal)):
        return None
    words = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(f"a{normal}a")
    return " ".join(word for word, _ in words)[1:-1]


class CharacterTable(dict[int, str]):
    """A `str.translate` table of the rules of characters, which are computed when they occur."""

    def __init__(self, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self.settings = lowercase, strip_accents

    def __missing__(self, code_point: int) -> str:
        if len(self) >= MAX_TABLE_CHARACTERS:
            self.clear()
        rule = character_rule(chr(code_point), *self.settings)
        self[code_point] = rule = IN_CONTEXT if rule is None else rule
        return rule


character_table = cache(CharacterTable)


def split_words(text: str, *, lowercase: bool, strip_accents: bool) -> list[str]:
    """Return the words of a text: each a punctuation mark, an ideograph or a run of letters."""
    split = text.translate(character_table(lowercase, strip_accents))
    if IN_CONTEXT not in split:
        return split.split()
    normal = bert_normalizer(lowercase, strip_accents).normalize_str(without_surrogates(text))
    return [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normal)]


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD, which normalization drops, in place of half surrogate pairs."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def stands_alone(letter: str) -> bool:
    """Return whether a character is always a word by itself, so that it has no "##" form."""
    rule = character_rule(letter, lowercase=False, strip_accents=False)
    return rule is not None and rule.startswith(" ")


# Files --------------------------------------------------------------------------------------------


def check_tokens(vocabulary: Sequence[str], source: str) -> None:
    """Refuse a vocabulary whose entries are not distinct tokens with the five special tokens.

    An entry of white space other than ASCII's is accepted (the genuine Chinese vocabulary has
    U+2028): no word can contain it, so it keeps its id and is never used. Spaces around an entry
    are refused because Google's code strips them and Hugging Face's does not.
    """
    lines: dict[str, int] = {}
    for line, token in enumerate(vocabulary, start=1):
        if not token:
            raise BertkitError(
                f"{source}, line {line}: the entry is empty; remove the line if it is the last one,"
                " else put a token there, since the line number is the id"
            )
        if token != token.strip(" \t\r\n") or "\n" in token or "\r" in token:
            raise BertkitError(
                f"{source}, line {line}: {token!r} has spaces around it; remove them"
            )
        if token in lines:
            raise BertkitError(
                f"{source}: lines {lines[token]} and {line} are both {token!r}; rename one of them,"
                " for example to an [unused] entry"
            )
        lines[token] = line
    missing = [token for token in SPECIAL_TOKENS if token not in lines]
    if missing:
        raise BertkitError(
            f"{source}: {', '.join(missing)} missing; a BERT vocabulary has one token per line,"
            f" including {', '.join(SPECIAL_TOKENS)}"
        )


def has_capitals(vocabulary: Sequence[str]) -> bool:
    """Return whether a vocabulary is cased: a token other than marks like [CLS] has a capital."""
    return any(token[0] not in "[<" and token != token.lower() for token in vocabulary)


def read_vocabulary(path: Path) -> list[str]:
    """Read the lines of a vocab.txt; the line number, from 0, is the id.

    Only a line feed (with or without a carriage return before it) ends a line: genuine vocabularies
    contain U+2028 and the like, at which `str.splitlines` would split.
    """
    check_file_size(path, MAX_FILE_BYTES)
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        raise BertkitError(
            f"{path} does not exist; give a vocab.txt or a folder that holds one"
        ) from None
    except OSError as error:
        raise BertkitError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BertkitError(
            f"{path} is not UTF-8 at byte {error.start}; is it a vocab.txt?"
        ) from None
    if lines[-1] == "":
        lines.pop()
    vocabulary = [line.removesuffix("\r") for line in lines]
    check_tokens(vocabulary, str(path))
    return vocabulary


VOCABULARIES = ("vocab.txt", "tokenizer.json")


def read_directory(directory: Path) -> tuple[list[str], dict[str, Any]]:
    """Read a directory's vocabulary and the `from_vocabulary` arguments that its files set.

    The directory is that of a tokenizer, of a run, whose model has it, or of a token store.
    """
    homes = (directory, directory / "model", directory / "tokenizer")
    named = [home for home in homes if any((home / name).is_file() for name in VOCABULARIES)]
    directory = named[0] if named else directory
    text_path = directory / "vocab.txt"
    json_path = directory / "tokenizer.json"
    config_path = directory / "tokenizer_config.json"
    vocabulary: list[str] | None = None
    settings: dict[str, Any] = {}
    if json_path.exists():
        vocabulary, settings = read_pipeline(json_path)
    if config_path.exists():
        settings |= read_tokenizer_config(config_path)
        if json_path.exists() and is_literal(tokenizer_class(read_object(config_path))):
            check_post_processor(json_path)
    if (special_path := directory / "special_tokens_map.json").exists():
        refuse_renamed(read_object(special_path), special_path)
    if (added_path := directory / "added_tokens.json").exists():
        refuse_added(read_object(added_path), added_path)
    if text_path.exists():
        listed = read_vocabulary(text_path)
        if vocabulary is not None and listed != vocabulary:
            raise BertkitError(
                f"{text_path} and tokenizer.json next to it hold different vocabularies"
                f" ({len(listed)} and {len(vocabulary)} tokens); remove the wrong file"
            )
        vocabulary = listed
    if vocabulary is None:
        raise BertkitError(
            f"{directory} holds neither vocab.txt nor tokenizer.json; is it a model directory?"
        )
    return vocabulary, settings


def refuse_added(tokens: Iterable[str], path: Path) -> None:
    """Refuse added tokens, which transformers matches whole in the raw text."""
    for token in tokens:
        if token not in SPECIAL_TOKENS:
            raise BertkitError(
                f"{path}: added token {token!r}; bertkit knows only"
                f" {', '.join(SPECIAL_TOKENS)} (make it an ordinary entry of vocab.txt, and remove"
                " it here)"
            )


def refuse_renamed(config: Mapping[str, Any], path: Path) -> None:
    """Refuse other tokens in the place of [CLS] and the like, which transformers would use."""
    for token in SPECIAL_TOKENS:
        field = f"{token.strip('[]').lower()}_token"
        entry = config.get(field)
        content = entry.get("content") if isinstance(entry, dict) else entry
        if content not in (None, token):
            raise BertkitError(f"{path}: {field} is {content!r}; bertkit reads only {token!r}")


def tokenizer_class(config: Mapping[str, Any]) -> str:
    """Return the name of the class of transformers that a tokenizer_config.json names."""
    return str(config.get("tokenizer_class") or "BertTokenizer")


def is_literal(kind: str) -> bool:
    """Return whether a class takes all of tokenizer.json, of which others take the vocabulary."""
    return kind.startswith(("PreTrained", "Tokenizers"))


def check_post_processor(path: Path) -> None:
    """Refuse a tokenizer.json which does not join texts as BERT does: [CLS] A [SEP] B [SEP].

    Raises:
        BertkitError: the special tokens or the segments are others, or the file is damaged.
    """
    try:
        pipeline = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no type of its own
        raise BertkitError(f"{path} cannot be read ({error}); restore or remake it") from error
    pipeline.no_truncation()
    pipeline.no_padding()
    single, pair = pipeline.encode("a"), pipeline.encode("a", "a")
    [word] = pipeline.encode("a", add_special_tokens=False).tokens
    if (single.tokens, single.type_ids) != (["[CLS]", word, "[SEP]"], [0, 0, 0]) or (
        (pair.tokens, pair.type_ids) != (["[CLS]", word, "[SEP]", word, "[SEP]"], [0, 0, 0, 1, 1])
    ):
        raise BertkitError(
            f"{path}: its post_processor encodes a pair as '{' '.join(pair.tokens)}' with the "
            f"segments {pair.type_ids}; bertkit reads only [CLS] A [SEP] B [SEP] with 0 0 0 1 1"
        )


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Return a tokenizer_config.json's normalisation settings under bertkit's names."""
    config = read_object(path)
    kind = tokenizer_class(config)
    if kind not in WORDPIECE_CLASSES:
        raise BertkitError(f"{path}: tokenizer_class {kind!r} is not a BERT WordPiece tokenizer")
    if config.get("tokenize_chinese_chars") is False:
        raise BertkitError(f"{path}: bertkit does not support tokenize_chinese_chars = false")
    fields = {
        "do_lower_case": ("lowercase", bool, "true or false"),
        "strip_accents": ("strip_accents", bool | None, "true, false or null"),
    }
    settings = {}
    for field, (name, kinds, wanted) in fields.items():
        if field in config:
            if not isinstance(config[field], kinds):
                raise BertkitError(f"{path}: {field} is {config[field]!r}; it must be {wanted}")
            settings[name] = config[field]
    if "lowercase" in settings and not is_literal(kind):
        settings.setdefault("strip_accents", None)  # transformers forgets that of tokenizer.json
    refuse_renamed(config, path)
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(isinstance(entry, dict) for entry in added.values()):
        raise BertkitError(f"{path}: added_tokens_decoder is not an object of tokens; restore it")
    refuse_added((str(entry.get("content")) for entry in added.values()), path)
    return settings


def make_pipeline(model: Any, *, lowercase: bool, strip_accents: bool) -> Any:
    """Build the BERT pipeline of the `tokenizers` library around a model."""
    pipeline = Tokenizer(model)
    pipeline.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=None if strip_accents == lowercase else strip_accents
    )
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, pipeline.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    pipeline.decoder = decoders.WordPiece(prefix=CONTINUATION)
    pipeline.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return pipeline


def read_pipeline(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Read vocabulary and settings of a tokenizer.json; its truncation and padding are ignored."""
    content = read_object(path, MAX_FILE_BYTES)
    try:
        model, normalizer = content["model"], content["normalizer"] or {}
        prefix = model.get("continuing_subword_prefix")
        longest = model.get("max_input_chars_per_word", MAX_WORD_CHARACTERS)
        expected = {
            "model.max_input_chars_per_word": (longest, MAX_WORD_CHARACTERS),
            "model.type": (model.get("type", "WordPiece"), "WordPiece"),
            "model.continuing_subword_prefix": (prefix, CONTINUATION),
            "model.unk_token": (model.get("unk_token"), "[UNK]"),
            "normalizer.type": (normalizer.get("type"), "BertNormalizer"),
            "normalizer.clean_text": (normalizer.get("clean_text"), True),
            "normalizer.handle_chinese_chars": (normalizer.get("handle_chinese_chars"), True),
            "pre_tokenizer.type": (
                (content["pre_tokenizer"] or {}).get("type"),
                "BertPreTokenizer",
            ),
        }
        for field, (value, wanted) in expected.items():
            if value != wanted:
                raise BertkitError(f"{path}: {field} is {value!r}; bertkit reads only {wanted!r}")
        refuse_added((token["content"] for token in content.get("added_tokens", ())), path)
        vocabulary = sorted(model["vocab"], key=model["vocab"].get)
        if [model["vocab"][token] for token in vocabulary] != list(range(len(vocabulary))):
            raise BertkitError(f"{path}: the ids of model.vocab are not 0, 1, 2, ...")
        if "" in vocabulary:  # transformers 5 strips U+2028, as the genuine Chinese vocabulary has
            stripped = ("", CONTINUATION)
            vocabulary = [piece + "\u2028" if piece in stripped else piece for piece in vocabulary]
        check_tokens(vocabulary, f"{path} (model.vocab by id)")
        lowercase, strip_accents = normalizer["lowercase"], normalizer.get("strip_accents")
        if not isinstance(lowercase, bool) or not isinstance(strip_accents, bool | None):
            raise TypeError("lowercase and strip_accents are true or false")
        return vocabulary, {"lowercase": lowercase, "strip_accents": strip_accents}
    except (KeyError, TypeError, AttributeError) as error:
        raise BertkitError(
            f"{path} is not a WordPiece tokenizer.json ({type(error).__name__}: {error}); remake it"
        ) from None
