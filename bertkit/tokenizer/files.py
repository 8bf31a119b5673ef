"""What a tokenizer is made of: the rules of BERT's words, and the files of a vocabulary.

The `tokenizers` library defines the rules of transformers' `BertTokenizer` (BERT, section 3):
control characters are dropped, accents are stripped and letters are lower-cased if the model is
uncased, and white space, punctuation and ideographs end a word. It treats each character
independently, except that it orders combining marks. So a table of what becomes of each character,
which asks the library once for each, splits whole texts quickly; a text with a mark whose order
matters is left to the library.

The files are vocab.txt, tokenizer.json and tokenizer_config.json, which are read and checked here.
Added tokens are those that the library matches in the text before it is split into words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import combining

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from bertkit.errors import BertkitError
from bertkit.files import check_file_size, read_object, read_optional

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPECIAL_ADDED = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
TASK_TOKENS = "additional_special_tokens"  # extra_special_tokens since transformers 5
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""How an added token is matched: as a whole word, with the spaces around it, in normalized text."""
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
LITERAL = ("PreTrained", "Tokenizers")
"""How the classes begin that take all of tokenizer.json, of which others take the vocabulary."""
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

    def __init__(self, rule: Callable[[str], str | None]) -> None:
        super().__init__()
        self.rule = rule

    def __missing__(self, code_point: int) -> str:
        if len(self) >= MAX_TABLE_CHARACTERS:
            self.clear()
        rule = self.rule(chr(code_point))
        self[code_point] = rule = IN_CONTEXT if rule is None else rule
        return rule


@cache
def character_table(lowercase: bool, strip_accents: bool) -> CharacterTable:
    """Return the table of `character_rule`."""
    return CharacterTable(lambda c: character_rule(c, lowercase, strip_accents))


@cache
def normal_table(lowercase: bool, strip_accents: bool) -> CharacterTable:
    """Return the table of what the library's normalizer makes of a character."""
    normalizer = bert_normalizer(lowercase, strip_accents)
    return CharacterTable(lambda c: normalizer.normalize_str(without_surrogates(c)))


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
        spaces = token != token.strip(" \t\r\n") or "\n" in token or "\r" in token
        wrong = "is empty" if not token else "has spaces around it" if spaces else ""
        if SURROGATE.search(token):  # JSON can hold it, UTF-8 cannot
            wrong = "has half of a surrogate pair"
        wrong = f"is that of line {lines[token]}, too" if token in lines else wrong
        if wrong:
            raise BertkitError(
                f"{source}, line {line}: the token {token!r} {wrong}; change it, for example to an "
                "[unused] entry, as line numbers are the ids"
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
    content = read_optional(json_path, maximum=MAX_FILE_BYTES)
    if content:
        vocabulary, settings = read_pipeline(json_path, content)
    if config_path.exists():
        settings |= read_tokenizer_config(config_path)
        if content and str(read_object(config_path).get("tokenizer_class")).startswith(LITERAL):
            check_template(content.get("post_processor") or {}, json_path)
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
    if added := read_added(directory, content, vocabulary):
        settings["added"] = added
    return vocabulary, settings


def check_template(processor: Mapping[str, Any], path: Path) -> None:
    """Refuse a tokenizer.json that does not join texts as BERT does: [CLS] A [SEP] B [SEP]."""
    if processor.get("type") == "BertProcessing":
        return
    for name, parts in ("single", "CLS0 A0 SEP0"), ("pair", "CLS0 A0 SEP0 B1 SEP1"):
        pieces = [next(iter(piece.values())) for piece in processor.get(name) or ()]
        template = " ".join(f"{piece['id'].strip('[]')}{piece['type_id']}" for piece in pieces)
        if template != parts:
            raise BertkitError(
                f"{path}: its post_processor makes '{template}' of a {name} input; bertkit reads "
                f"only '{parts}' (each token with its segment)"
            )


def read_added(
    directory: Path, content: Mapping[str, Any], vocabulary: Sequence[str]
) -> list[AddedToken]:
    """Return the added tokens of a directory in the order of their ids, read as transformers does.

    `content` is that of tokenizer.json. If tokenizer_config.json lists the tokens, the other files
    do not count. The special tokens are not returned, unless their flags are unusual.
    """
    config = read_optional(directory / "tokenizer_config.json")
    try:
        special, numbered = config, config.get("added_tokens_decoder")
        if numbered is None:
            special = config | read_optional(directory / "special_tokens_map.json")
            named = listed_tokens({**special, TASK_TOKENS: config.get(TASK_TOKENS)}, directory)
            names = {token.content for token in named}
            numbers = read_optional(directory / "added_tokens.json").items()
            numbered = {n: {"content": text, "special": text in names} for text, n in numbers}
            numbered |= {token["id"]: token for token in content.get("added_tokens", ())}
        tokens = {int(number): token_of(token) for number, token in numbered.items()}
        ids = {token: number for number, token in enumerate(vocabulary)}
        known = ids | {token.content: number for number, token in tokens.items()}
        tokens = {known.get(t.content, -1): t for t in listed_tokens(special, directory)} | tokens
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BertkitError(
            f"{directory}: an added token is damaged ({type(error).__name__}: {error}); copy the "
            "files of the tokenizer again"
        ) from None
    for number in sorted(tokens):
        text = tokens[number].content
        if ids.setdefault(text, len(ids)) != number:
            raise BertkitError(
                f"{directory}: the added token {text!r} must have the id {ids[text]}, as ids have "
                "no gaps; save the tokenizer and the model again with transformers"
            )
    usual = [token.__getstate__() for token in SPECIAL_ADDED]
    return [tokens[n] for n in sorted(tokens) if tokens[n].__getstate__() not in usual]


def listed_tokens(special: Mapping[str, Any], path: Path) -> list[AddedToken]:
    """Return the special tokens that a special_tokens_map.json or tokenizer_config.json names."""
    names = [f"{token.strip('[]').lower()}_token" for token in SPECIAL_TOKENS]
    more = special.get("extra_special_tokens") or special.get(TASK_TOKENS) or []
    more = list(more.values() if isinstance(more, dict) else more)
    values = [special.get(name) or token for name, token in zip(names, SPECIAL_TOKENS, strict=True)]
    entries = [{"content": v} if isinstance(v, str) else v for v in values + more]
    tokens = [token_of({**entry, "special": True}) for entry in entries]
    for name, token, wanted in zip(names, tokens, SPECIAL_TOKENS, strict=False):
        if token.content != wanted:  # transformers would use it
            raise BertkitError(f"{path}: {name} is {token.content!r}, and only {wanted!r} is read")
    return tokens


def token_of(value: Mapping[str, Any]) -> AddedToken:
    """Make an added token of its JSON object."""
    flags = {flag: value[flag] for flag in TOKEN_FLAGS if flag in value}
    return AddedToken(value["content"], **{"normalized": not flags.get("special")} | flags)


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Return a tokenizer_config.json's normalisation settings under bertkit's names."""
    config = read_object(path)
    kind = str(config.get("tokenizer_class") or "BertTokenizer")
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
    if "lowercase" in settings and not kind.startswith(("PreTrained", "Tokenizers")):
        settings.setdefault("strip_accents", None)  # transformers forgets that of tokenizer.json
    return settings


def make_pipeline(
    model: Any, *, lowercase: bool, strip_accents: bool, added: Sequence[AddedToken] = ()
) -> Any:
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
    named = {token.content for token in added}
    pipeline.add_tokens([token for token in SPECIAL_ADDED if token.content not in named])
    pipeline.add_tokens(list(added))
    return pipeline


def read_pipeline(path: Path, content: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Read vocabulary and settings of a tokenizer.json; its truncation and padding are ignored."""
    try:
        model, normalizer = content["model"], content["normalizer"] or {}
        splitter = content["pre_tokenizer"] or {}
        prefix = model.get("continuing_subword_prefix")
        longest = model.get("max_input_chars_per_word", MAX_WORD_CHARACTERS)
        longest = MAX_WORD_CHARACTERS if longest == 200 else longest  # Google's, which is ignored
        expected = {
            "model.max_input_chars_per_word": (longest, MAX_WORD_CHARACTERS),
            "model.type": (model.get("type", "WordPiece"), "WordPiece"),
            "model.continuing_subword_prefix": (prefix, CONTINUATION),
            "model.unk_token": (model.get("unk_token"), "[UNK]"),
            "normalizer.type": (normalizer.get("type"), "BertNormalizer"),
            "normalizer.clean_text": (normalizer.get("clean_text"), True),
            "normalizer.handle_chinese_chars": (normalizer.get("handle_chinese_chars"), True),
            "pre_tokenizer.type": (splitter.get("type"), "BertPreTokenizer"),
        }
        for field, (value, wanted) in expected.items():
            if value != wanted:
                raise BertkitError(f"{path}: {field} is {value!r}; bertkit reads only {wanted!r}")
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
