"""Token classification: one tag for each word (paper section 5.3; CoNLL-2003).

The loss and the result of a word are at its first token; its other tokens are only context. A word
without any token (control characters, an empty string) becomes [UNK]. Each word is trained and
predicted in one window. With context "document", the sentences of a document form one stream, so
that a window holds all the neighbours that fit: the paper's "maximal document context".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bertkit.errors import BertkitError, check_known
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import LossSum, Sums
from bertkit.model.outputs import TokenClassificationModel
from bertkit.tasks.entities import (
    STANDARD,
    UNMARKED,
    WordColumns,
    WordsExample,
    entity_scores,
    find_entities,
    joined,
    standard_tag,
    tag_pattern,
    to_iob2,
)
from bertkit.tasks.sequences import WindowLengths, plan_windows, surround
from bertkit.tasks.task import (
    Inputs,
    Item,
    ItemPart,
    Items,
    Metrics,
    Outputs,
    Parts,
    Result,
    Results,
    Targets,
    Task,
    TaskBatch,
    TrainingData,
    balanced,
    note_similar,
    softmax,
    unknown_label,
)
from bertkit.tokenizer.wordpiece import Tokenizer

CONTEXTS = ("sentence", "document")
NO_TAG = -1


@dataclass(frozen=True, kw_only=True)
class WordWindows(WindowLengths):
    """The lengths of windows of tagged words, and what a window may span."""

    context: str = "sentence"
    """sentence, or document, in which each word also sees the surrounding sentences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("context", self.context, CONTEXTS)


class WordTarget(NamedTuple):
    """The n words that are predicted in a window, in order."""

    rows: np.ndarray  # (n,) index of the first token of each word in the sequence, [CLS] being 0
    labels: np.ndarray  # (n,) index of its tag; `NO_TAG` if the data has none
    inputs: np.ndarray  # (n,) index of its sentence
    words: np.ndarray  # (n,) its number in the sentence


@dataclass(frozen=True, slots=True)
class Word(Result):
    """A word of a text, `text[start:end]`, and its tag."""

    word: str
    tag: str
    probability: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Entity(Result):
    """A tagged span of a text, `text[start:end]`; the words are `words[word_start:word_end]`."""

    type: str
    start: int
    end: int
    text: str
    word_start: int
    word_end: int


@dataclass(frozen=True, slots=True)
class TagsResult(Result):
    """The tags of the words of a text, and the entities that they form."""

    words: tuple[Word, ...]
    entities: tuple[Entity, ...]  # () if the tags are not entity tags

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(word.tag for word in self.words)


@dataclass(frozen=True)
class TokenClassification(Task):
    """A task with one label for each word of each input."""

    labels: tuple[str, ...]
    max_length: int = 512
    stride: int = 0  # the number of tokens from one window to the next; 0 for 3/4 of the room
    context: str = "sentence"  # what a window may span: one "sentence", or the whole "document"
    entities: bool = True
    """Whether tags are entity tags such as O and B-PER or PER; others are scored word by word."""
    task_type = "token-classification"
    head = "token"
    columns = WordColumns
    windows = WordWindows
    input_fields = ("words",)
    group_by = "document"
    has_labels = True
    answer_field = "tags"

    def __post_init__(self) -> None:
        if self.max_length < 3:
            raise BertkitError(f"a length of {self.max_length} leaves no room for a word")

    @classmethod
    def from_data(cls, data: TrainingData) -> Self:
        labels, entities = tag_labels(data.examples)
        note_similar(labels, data.counts)
        alone = len({example.document for example in data.examples}) == len(data.examples)
        if data.windows.context == "document" and alone:
            what = "in the training data each sentence is a document of its own"
            raise BertkitError(f"{what}; start documents with -DOCSTART-, or leave --context out")
        if not entities:
            what = "no tag is O, so tags are scored word by word and form no entities, kept"
            data.counts.note(what, data.examples[0].location)
        return cls(labels, data.max_length, data.windows.stride, data.windows.context, entities)

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """The pattern of the model's entity tags; None without entities."""
        return tag_pattern(self.labels) if self.entities else None

    @property
    def metric(self) -> str:
        return "f1" if self.pattern else "accuracy"

    def build(self, config: ModelConfig) -> TokenClassificationModel:
        return TokenClassificationModel(config, len(self.labels))

    def items(self, inputs: Inputs, tokenizer: Tokenizer) -> Items:
        """Each sentence is an item, or with document context each window."""
        room = self.max_length - 2
        words = list(dict.fromkeys(chain.from_iterable(example.words for example in inputs)))
        encoded = dict(zip(words, tokenizer.encode_batch(words), strict=True))
        long = {word for word, ids in encoded.items() if len(ids) > room}
        tokens = {word: ids[:room] or [tokenizer.unk_id] for word, ids in encoded.items()}
        labels = self.label_indices(inputs)
        items: list[Item] = []
        windows_of: Counter[int] = Counter()
        by_document = self.context == "document"
        owner = [example.document if by_document else i for i, example in enumerate(inputs)]
        for _, group in groupby(range(len(inputs)), key=owner.__getitem__):
            stream = list(group)
            parts = self.word_windows(stream, inputs, tokens, labels, tokenizer)
            for part in parts:
                windows_of.update(np.unique(part.target.inputs).tolist())
            if by_document:
                items += [Item(int(part.target.inputs[0]), [part]) for part in parts]
            elif parts:
                parts = [part._replace(is_first=n == 0) for n, part in enumerate(parts)]
                items.append(Item(stream[0], parts))
        windowed = sum(count > 1 for count in windows_of.values())
        cut = sum(not long.isdisjoint(example.words) for example in inputs) if long else 0
        return Items(items, len(inputs), windowed, {f"inputs with words cut at {room} tokens": cut})

    def word_windows(
        self,
        stream: Sequence[int],
        inputs: Sequence[WordsExample],
        tokens: Mapping[str, Sequence[int]],
        labels: Sequence[np.ndarray],
        tokenizer: Tokenizer,
    ) -> list[ItemPart]:
        """Make the windows `[CLS] words [SEP]` of consecutive sentences that predict a word."""
        words = [tokens[word] for i in stream for word in inputs[i].words]
        if not words:
            return []
        lengths = np.array([len(word) for word in words])
        ids = np.array(list(chain.from_iterable(words)), dtype=np.int32)
        counts = [len(inputs[i].words) for i in stream]
        owners = np.repeat(stream, counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        known = np.concatenate([labels[i] for i in stream])
        ends = np.cumsum(lengths)
        starts = ends - lengths
        parts = []
        for first, end, owned in plan_windows(lengths, self.max_length - 2, self.stride):
            if len(owned):
                window = surround(ids[starts[first] : ends[end - 1]], None, tokenizer)
                rows = 1 + starts[owned] - starts[first]
                target = WordTarget(rows, known[owned], owners[owned], numbers[owned])
                parts.append(ItemPart((window,), target))
        return parts

    def label_indices(self, inputs: Inputs) -> list[np.ndarray]:
        """Return for each sentence (words,) the label index of each tag, or `NO_TAG` without."""
        number = {standard_tag(name, self.pattern): i for i, name in enumerate(self.labels)}
        if self.pattern:  # B-X maps to I-X in models without B-X, as for IO and IOB1
            number = {f"B{n[1:]}": i for n, i in number.items() if n[:1] == "I"} | number
        indices = []
        for example in inputs:
            tags = self.in_scheme(example.tags or ())
            for tag, shown in zip(tags, example.tags or (), strict=True):
                known = shown == "O" or not self.pattern or self.pattern.fullmatch(shown)
                if tag not in number or not known:
                    raise unknown_label(shown, example.location, self.labels)
            tagged = [number[tag] for tag in tags]
            indices.append(np.array(tagged or [NO_TAG] * len(example.words), dtype=np.int64))
        return indices

    def in_scheme(self, tags: Sequence[str]) -> Sequence[str]:
        """Convert entity tags to IOB2; return others unchanged."""
        standard = [standard_tag(tag, self.pattern) for tag in tags]
        return to_iob2(standard) if self.pattern else standard

    def targets(self, parts: Parts, packed_index: np.ndarray, starts: np.ndarray) -> Targets:
        """The tensors are "rows", the token indices of tagged words in the batch, and "labels"."""
        pairs = zip(starts, parts, strict=True)
        rows = np.concatenate([start + part.target.rows for start, part in pairs])
        labels = np.concatenate([part.target.labels for part in parts])
        tagged = labels != NO_TAG
        tensors = {"rows": rows[tagged], "labels": labels[tagged]}
        counts = {"words": int(tagged.sum())}
        return {name: torch.from_numpy(values) for name, values in tensors.items()}, counts

    def loss(self, model: nn.Module, batch: TaskBatch) -> Sums:
        logits = model(batch.packed).index_select(0, batch.tensors["rows"]).float()
        weights = batch.tensors.get("class_weights")
        labels = batch.tensors["labels"]
        loss = F.cross_entropy(logits, labels, weight=weights, reduction="sum")
        return {"loss": LossSum(loss, "words")}

    def balanced_weights(self, items: Items) -> np.ndarray:
        labels = np.concatenate([part.target.labels for part in items.parts()])
        return balanced(np.bincount(labels[labels != NO_TAG], minlength=len(self.labels)))

    def decode(self, inputs: Inputs, items: Items, outputs: Outputs) -> list[TagsResult]:
        counts = [len(example.words) for example in inputs]
        ends = np.cumsum(counts, dtype=np.int64)
        begins = ends - counts
        best = np.full(sum(counts), NO_TAG)
        chance = np.zeros(len(best))
        for item, rows in zip(items.items, outputs, strict=True):
            for part, logits in zip(item.parts, rows, strict=True):
                target: WordTarget = part.target
                chances = softmax(logits[target.rows])
                at = begins[target.inputs] + target.words
                best[at], chance[at] = chances.argmax(axis=1), chances.max(axis=1)
        names = [self.labels[i] for i in best]
        return [
            self.tagged(example, names[begin:end], chance[begin:end].tolist())
            for example, begin, end in zip(inputs, begins, ends, strict=True)
        ]

    def tagged(
        self, example: WordsExample, tags: Sequence[str], chances: Sequence[float]
    ) -> TagsResult:
        """Add character spans to tags and entities, in the words joined by spaces if need be."""
        text, spans = (example.text, example.spans) if example.spans else joined(example.words)
        rows = zip(example.words, tags, chances, spans, strict=True)
        words = tuple(Word(word, tag, p, start, end) for word, tag, p, (start, end) in rows)
        standard, entities = [standard_tag(tag, self.pattern) for tag in tags], []
        for kind, first, last in find_entities(standard) if self.pattern else ():
            start, end = spans[first][0], spans[last - 1][1]
            entities.append(Entity(kind, start, end, text[start:end], first, last))
        return TagsResult(words, tuple(entities))

    def answer_value(self, result: TagsResult) -> tuple[str, ...]:
        return tuple(self.in_scheme(result.tags))

    def gold_value(self, example: WordsExample) -> tuple[str, ...]:
        return tuple(self.in_scheme(example.tags or ()))

    def score(self, inputs: Inputs, results: Results) -> Metrics:
        return self.score_tags(inputs, [self.answer_value(result) for result in results])

    def score_tags(self, inputs: Inputs, tags: Sequence[Sequence[str]]) -> Metrics:
        gold = [self.gold_value(example) for example in inputs]
        pairs = list(zip(chain.from_iterable(gold), chain.from_iterable(tags), strict=True))
        accuracy = {"accuracy": sum(a == b for a, b in pairs) / max(1, len(pairs))}
        if not self.pattern:
            return accuracy
        return entity_scores(gold, tags) | accuracy

    def baseline(self, inputs: Inputs) -> Metrics:
        """Always the most frequent tag."""
        seen = Counter(tag for example in inputs for tag in self.gold_value(example))
        common = seen.most_common(1)[0][0] if seen else self.labels[0]
        return self.score_tags(inputs, [self.in_scheme([common] * len(i.words)) for i in inputs])


def tag_labels(inputs: Inputs) -> tuple[tuple[str, ...], bool]:
    """Return the labels, O first and entities' with B and I, and whether they are entity tags."""
    seen = set(chain.from_iterable(example.tags or () for example in inputs))
    if len(seen) < 2:
        what = f"only the tag {next(iter(seen))!r}" if seen else "no word"
        raise BertkitError(f"the training data has {what}; there is nothing to tell apart")
    others = sorted(tag for tag in seen - {"O"} if not STANDARD.fullmatch(tag))
    if others and any(tag.startswith(("B-", "I-")) for tag in seen):
        raise BertkitError(
            f"the training data mixes tags such as B-PER with '{others[0]}'; correct one of them"
        )
    pattern = tag_pattern(seen)
    if pattern is UNMARKED and {tag[:2] for tag in seen} >= {"b-", "i-"}:
        raise BertkitError("tags such as b-per and i-per form no entities; write B-per and I-per")
    for match in map(pattern.fullmatch, seen - {"O"}) if pattern else ():
        if match and match["mark"]:
            tag, at = match.string, match.start("mark")
            seen = seen - {tag} | {f"{tag[:at]}{mark}{tag[at + 1 :]}" for mark in "BI"}
    return tuple(sorted(seen, key=lambda tag: (tag != "O", tag))), pattern is not None
