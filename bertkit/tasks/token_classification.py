"""Token classification: one tag for each word (paper section 5.3; CoNLL-2003).

`windows.py` makes windows of words: each word is trained and predicted in one of them, at its first
token. With context "document", the sentences of a document form one stream, so that a window holds
all the neighbours that fit: the paper's "maximal document context".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.datasets.conll import (
    ENTITY_TAG,
    NO_TAGS,
    are_entity_tags,
    conll_scheme,
    entity_scores,
    find_entities,
    to_iob2,
    write_conll,
)
from bertkit.datasets.examples import WordsExample, joined
from bertkit.errors import BertkitError, check_known
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import TokenClassificationModel
from bertkit.objectives import LossSum, Sums
from bertkit.tasks.classification import SEEN_ONCE, balanced, softmax, unknown_label
from bertkit.tasks.predictions import TagsPrediction, tagged_text
from bertkit.tasks.task import Item, ItemPart, Items, PredictedSplit, Task, TaskBatch, TaskInputs
from bertkit.tasks.windows import CONTEXTS, NO_TAG, WordTarget, word_tokens, word_windows
from bertkit.tokenizer.wordpiece import Tokenizer


@dataclass(frozen=True)
class TokenClassification(Task):
    """A task with one label for each word of each input."""

    labels: tuple[str, ...]
    max_length: int = 512
    stride: int = 0
    """The number of tokens from one window to the next; 0 for 3/4 of the room."""
    context: str = "sentence"
    """What a window may span: one "sentence", or the whole "document"."""
    entities: bool = True
    """Whether tags are entity tags such as B-PER, I-PER, O; others are scored word by word."""
    task_type = "token-classification"
    answer_field = "tags"

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`."""
        labels, entities = tag_labels(data.train)
        for name in seen_once(data.train, entities):
            data.counts.note(SEEN_ONCE, name)
        if all(len(given.words) == 1 for given in data.train):
            reason = "sentence of one word, like all others (a word a line is .txt or .tsv), kept"
            data.counts.note(reason, data.train[0].place)
        if data.windows.context == "document" and are_all_unique(data.train):
            raise BertkitError(
                "--context document, and in the training data every sentence is a document of its "
                "own; start documents with -DOCSTART- lines, name the column of documents "
                "(--document), or leave --context out"
            )
        return cls(labels, data.max_length, data.windows.stride, data.windows.context, entities)

    @classmethod
    def foreign_settings(cls, max_length: int, labels: Sequence[str]) -> dict[str, Any]:
        """See `Task`; also tells whether the labels are entity tags."""
        return {"max_length": max_length, "entities": are_entity_tags({*labels} - NO_TAGS)}

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            BertkitError: there is no such context, or no room for a token.
        """
        check_known("context", self.context, CONTEXTS)
        if self.max_length < 3:
            raise BertkitError(
                f"a length of {self.max_length} leaves no room for a word; give at least 3 tokens"
            )

    @property
    def metric(self) -> str:
        """See `Task`; the F1 of entities, or the accuracy of other tags."""
        return "f1" if self.entities else "accuracy"

    def build(self, config: ModelConfig) -> TokenClassificationModel:
        """See `Task`."""
        return TokenClassificationModel(config, len(self.labels))

    def items(self, inputs: Sequence[WordsExample], tokenizer: Tokenizer) -> Items:
        """See `Task`; each sentence, or with document context each window, is one item.

        `windowed` counts the sentences whose words are predicted in more than one window.

        Raises:
            BertkitError: a tag is unknown or not a valid entity tag, or the numbers of words and
                tags of a sentence differ; the message names the location.
        """
        room = self.max_length - 2
        pieces, cut = word_tokens(inputs, tokenizer, room)
        number = {label: i for i, label in enumerate(self.labels)}
        if self.entities:  # B-X maps to I-X in foreign IOB1 models, which have no B-X
            begins = {f"B{name[1:]}": i for name, i in number.items() if name[:1] == "I"}
            number = begins | number
        labels = [self._labels(given, number) for given in inputs]
        found: list[Item] = []
        spread: Counter[int] = Counter()
        whole = self.context == "document"  # consecutive sentences of a document form one stream
        for _, group in groupby(
            range(len(inputs)), key=lambda i: inputs[i].document if whole else i
        ):
            made = word_windows(
                *(list(group), inputs, pieces, labels, tokenizer), self.max_length, self.stride
            )
            for _, part in made:
                spread.update(np.unique(part.target.inputs).tolist())
            if whole:
                found += [Item(first, [part]) for first, part in made]
            elif made:
                parts = [part._replace(leads=n == 0) for n, (_, part) in enumerate(made)]
                found.append(Item(made[0][0], parts))
        windowed = sum(count > 1 for count in spread.values())
        return Items(found, len(inputs), windowed, {f"inputs with words cut at {room} tokens": cut})

    def _labels(self, given: WordsExample, number: Mapping[str, int]) -> np.ndarray:
        """Return (words,) the label index of each tag, or `NO_TAG` without tags."""
        if given.tags is None:
            return np.full(len(given.words), NO_TAG)
        if len(given.tags) != len(given.words):
            raise BertkitError(
                f"{given.place}: {len(given.tags)} tags for {len(given.words)} words; give each "
                "word one tag"
            )
        for place, tag in enumerate(given.tags, 1):
            if self.entities and not ENTITY_TAG.fullmatch(tag):
                raise BertkitError(
                    f"{given.place}, word {place}: {tag!r} is not an entity tag; these are O or "
                    f"have B-, I-, E-, S-, L- or U- before a type; correct it"
                )
        tags = self._scheme(given.tags)
        for place, tag in enumerate(tags, 1):
            if tag not in number:
                own = given.tags[place - 1]
                shown = f"{tag} (written {own})" if own in number else own
                raise unknown_label(shown, f"{given.place}, word {place}", self.labels)
        return np.array([number[tag] for tag in tags], dtype=np.int64)

    def _scheme(self, tags: Sequence[str]) -> Sequence[str]:
        """Convert entity tags to IOB2; return others unchanged."""
        return to_iob2(tags) if self.entities else tags

    def targets(
        self, parts: Sequence[ItemPart], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """See `Task`; "rows" has the token indices in the batch of tagged words, "labels" tags."""
        rows = np.concatenate(
            [start + part.target.rows for start, part in zip(starts, parts, strict=True)]
        )
        labels = np.concatenate([part.target.labels for part in parts])
        tagged = labels != NO_TAG
        tensors = {
            "rows": torch.from_numpy(rows[tagged]),
            "labels": torch.from_numpy(labels[tagged]),
        }
        return tensors, {"words": int(tagged.sum())}

    def objective(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """See `Task`; the loss is the cross entropy at the first token of every word."""
        logits = model(batch.packed).index_select(0, batch.tensors["rows"]).float()
        weights = batch.tensors.get("class_weights")
        labels = batch.tensors["labels"]
        loss = F.cross_entropy(logits, labels, weight=weights, reduction="sum")
        return {"loss": LossSum(loss, "words")}

    def balanced_weights(self, items: Items) -> np.ndarray:
        """See `Task`; words / (tags x words with the tag)."""
        labels = np.concatenate([part.target.labels for item in items.items for part in item.parts])
        return balanced(np.bincount(labels[labels != NO_TAG], minlength=len(self.labels)))

    def decode(
        self, inputs: Sequence[WordsExample], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[TagsPrediction]:
        """See `Task`."""
        ends = np.cumsum([len(given.words) for given in inputs], dtype=np.int64)
        total = int(ends[-1]) if inputs else 0
        begins = ends - [len(given.words) for given in inputs]
        best, chance = np.full(total, NO_TAG), np.zeros(total)
        for item, rows in zip(items.items, outputs, strict=True):
            for part, logits in zip(item.parts, rows, strict=True):
                target: WordTarget = part.target
                chances = softmax(logits[target.rows])
                if self.entities:  # never predict the padding labels that foreign models may have
                    chances[:, [label in NO_TAGS for label in self.labels]] = -1.0
                at = begins[target.inputs] + target.words
                best[at], chance[at] = chances.argmax(axis=1), chances.max(axis=1)
        assert (best != NO_TAG).all(), "every word is answered in one window"
        names, found = [self.labels[i] for i in best], []
        for begin, end in zip(begins, ends, strict=True):
            tags = tuple(names[begin:end])
            entities = tuple(find_entities(conll_scheme(tags))) if self.entities else ()
            found.append(TagsPrediction(tags, tuple(chance[begin:end].tolist()), entities))
        return found

    def plain(self, prediction: TagsPrediction) -> tuple[str, ...]:
        """See `Task`; entity tags are in IOB2."""
        return tuple(self._scheme(prediction.tags))

    def plain_gold(self, given: WordsExample) -> tuple[str, ...]:
        """See `Task`; entity tags are in IOB2."""
        return tuple(self._scheme(given.tags or ()))

    def score(
        self, inputs: Sequence[WordsExample], predictions: Sequence[TagsPrediction]
    ) -> dict[str, float]:
        """See `Task`; entity F1, precision and recall, in total and per type, and tag accuracy.

        Entities are defined as in the conlleval script, whatever the scheme. The accuracy is that
        of tags in IOB2.
        """
        gold = [self.plain_gold(given) for given in inputs]
        found = [self.plain(prediction) for prediction in predictions]
        pairs = list(zip(chain.from_iterable(gold), chain.from_iterable(found), strict=True))
        accuracy = {"accuracy": sum(a == b for a, b in pairs) / max(1, len(pairs))}
        if not self.entities:
            return accuracy
        scores = entity_scores(gold, found)
        first = {name: scores.pop(name) for name in ("f1", "precision", "recall")}
        return {**first, **accuracy, **scores}

    def baseline(self, inputs: Sequence[WordsExample]) -> dict[str, float]:
        """See `Task`; always the most frequent tag."""
        seen = Counter(tag for given in inputs for tag in self.plain_gold(given))
        common = seen.most_common(1)[0][0] if seen else self.labels[0]
        return self.score(
            inputs, [TagsPrediction((common,) * len(i.words), (), ()) for i in inputs]
        )

    def degenerate(
        self, inputs: Sequence[WordsExample], predictions: Sequence[TagsPrediction]
    ) -> str:
        """See `Task`; no entity found, or the same tag for every word, although gold has others."""
        wanted = {tag for given in inputs for tag in given.tags or ()}
        if self.entities:
            some = any(prediction.entities for prediction in predictions)
            return "" if some or wanted <= {"O"} else "finds no entity"
        found = {tag for prediction in predictions for tag in prediction.tags}
        same = len(found) == 1 and len(wanted) > 1
        return f"gives every word the tag {found.pop()!r}" if same else ""

    def row(self, given: WordsExample, prediction: TagsPrediction) -> dict[str, Any]:
        """See `Task`; the `text` of an entity is `[start:end]` of the running text.

        If words were given, the running text is the words joined by spaces. `word_start` and
        `word_end` count words.
        """
        text, spans = (given.text, given.spans) if given.spans else joined(given.words)
        tagged = tagged_text(prediction, text, spans)
        return {
            "id": given.id,
            "words": list(given.words),
            "tags": list(prediction.tags),
            "probabilities": list(prediction.probabilities),
            "entities": [entity.to_dict() for entity in tagged.entities],
        }

    def official_files(self, folder: Path, done: PredictedSplit) -> list[Path]:
        """See `Task`; the file is for the conlleval script."""
        path = folder / f"{done.split}.txt"
        write_conll(path, done.inputs, [prediction.tags for prediction in done.predictions])
        return [path]


def are_all_unique(inputs: Sequence[WordsExample]) -> bool:
    """Return whether every document has only one sentence, as when documents are not marked."""
    return len({given.document for given in inputs}) == len(inputs)


def tag_labels(inputs: Sequence[WordsExample]) -> tuple[tuple[str, ...], bool]:
    """Return the labels for tagged inputs, sorted with "O" first, and whether they are entity tags.

    Entity labels are B- and I- for every type that occurs, since a type may occur only as single
    words (B and I if entities have no types); others, such as parts of speech, are unchanged.

    Raises:
        BertkitError: an input has no tags, all words have the same tag, or entity tags are mixed
            with others.
    """
    seen: set[str] = set()
    for given in inputs:
        if given.tags is None:
            raise BertkitError(f"{given.place}: the sentence has no tags; name the column of tags")
        seen.update(given.tags)
    if len(seen) < 2:
        found = f"only the tag {next(iter(seen))!r}" if seen else "no word"
        raise BertkitError(f"the training data has {found}; there is nothing to tell apart")
    others = sorted(tag for tag in seen if not ENTITY_TAG.fullmatch(tag))
    if others and any(tag.startswith(("B-", "I-")) for tag in seen):
        raise BertkitError(
            f"the training data mixes tags such as B-PER with '{others[0]}'; correct one of them"
        )
    are_entities = are_entity_tags(seen)
    if are_entities:
        kinds = {tag[1:] for tag in seen - {"O"}}  # "-PER", or "" without types
        seen = {"O"} | {f"{prefix}{kind}" for prefix in "BI" for kind in kinds}
    return tuple(sorted(seen, key=lambda tag: (tag != "O", tag))), are_entities


def seen_once(inputs: Sequence[WordsExample], are_entities: bool) -> list[str]:
    """Return descriptions of the entity types, or other tags, that occur only once."""
    seen: Counter[str] = Counter()
    for given in inputs:
        tags = given.tags or ()
        found = [kind for kind, _, _ in find_entities(conll_scheme(tags))] if are_entities else tags
        seen.update(found)
    what = "entity" if are_entities else "tag"
    return [f"{what} {name!r}" for name, count in seen.items() if count == 1]
