"""Whether a network that read several languages takes a task from one of them to the others.

The text is the manual of LibreOffice in English, German, French and Spanish, as Debian packages it
(libreoffice-help-en-us, -de, -fr, -es; `apt-get install` puts them where --manual looks). One
network is pre-trained on all four languages, with one vocabulary and smoothing 0.7, and another
one with the same vocabulary and number of updates on English alone. Both are fine-tuned on English
paragraphs, to tell which program a paragraph describes, and then asked about paragraphs of the
other languages, which come from pages that neither saw in any language. The names of the programs
are taken out of the paragraphs. Logistic regression on TF-IDF features of words stands beside them:
it can carry over only words that the languages share.

The page docs/open-questions.md has the results, in results/question-languages.json.

    python -m benchmarks.languages --work FOLDER [--manual FOLDER] [--seeds 3]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from benchmarks.record import summary, write_result
from benchmarks.speedrun import evaluate_held_out, finish_run
from bertkit.config import read_recipe
from bertkit.corpus.build import PrepareOptions, prepare
from bertkit.corpus.store import TokenStore
from bertkit.files import write_text
from bertkit.pretraining_data.mixture import mix_stores
from bertkit.sklearn import BertClassifier
from bertkit.tokenizer.learn import LearnOptions, learn_tokenizer
from bertkit.training.recipe import PretrainRecipe

LANGUAGES = {"en": "en-US", "de": "de", "fr": "fr", "es": "es"}
"""Language -> its folder in the manual."""
PROGRAMS = {
    "swriter": "writer", "scalc": "calc", "simpress": "impress", "sdraw": "impress",
    "sbasic": "basic",
}  # fmt: skip
"""Folder of the manual -> label. Pages in other folders are read for pre-training only."""
NAMES = re.compile(r"\b(libreoffice|writer|calc|impress|draw|basic|math|chart)\b", re.IGNORECASE)
MIN_WORDS, MAX_ROWS, MAX_TEST_ROWS = 8, 6_000, 2_000
VOCABULARY, SMOOTHING = 16_000, 0.7
FLAGS = ("--phases.steps", "800", "1200", "400")
"""A little over a third of the updates of `two-cores`."""


Rows = tuple[list[str], list[str]]
"""Texts and their labels."""


class Page(NamedTuple):
    """A page of the manual."""

    name: str
    """The path of the page, which is the same in every language."""
    paragraphs: list[str]

    @property
    def is_test(self) -> bool:
        """Whether the page, in every language, is held out for testing: one in five is."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 5 == 0


class Paragraphs(HTMLParser):
    """Collects the text of the paragraphs and headings of a page's article."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._article = self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note where the article begins and ends, and begin a paragraph."""
        place = dict(attrs).get("id")
        if place in ("DisplayArea", "SearchFrame"):
            self._article = place == "DisplayArea"
        if self._article and tag in ("p", "h1", "h2", "h3"):
            self.found.append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        """End a paragraph."""
        self._open = self._open and tag not in ("p", "h1", "h2", "h3")

    def handle_data(self, data: str) -> None:
        """Take the text of a paragraph."""
        if self._open:
            self.found[-1] += data


def read_pages(manual: Path, language: str) -> Iterator[Page]:
    """Yield the pages of a language that have text."""
    folder = manual / LANGUAGES[language] / "text"
    for path in sorted(folder.rglob("*.html")):
        parser = Paragraphs()
        parser.feed(path.read_text(encoding="utf-8"))
        paragraphs = [" ".join(one.split()) for one in parser.found]
        if any(paragraphs):
            yield Page(str(path.relative_to(folder)), [one for one in paragraphs if one])


def task_rows(pages: list[Page], *, test: bool) -> Rows:
    """Return the texts and labels of some of the paragraphs, without the programs' names."""
    rows = [
        (NAMES.sub("", paragraph), PROGRAMS[page.name.partition("/")[0]])
        for page in pages
        if page.is_test == test and page.name.partition("/")[0] in PROGRAMS
        for paragraph in page.paragraphs
        if len(paragraph.split()) >= MIN_WORDS
    ]
    most = MAX_TEST_ROWS if test else MAX_ROWS
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:most])
    return [rows[i][0] for i in chosen], [rows[i][1] for i in chosen]


def prepare_stores(pages: dict[str, list[Page]], work: Path) -> dict[str, TokenStore]:
    """Return a store for each language, all with one vocabulary."""
    texts = {language: work / "text" / f"{language}.jsonl" for language in pages}
    for language, path in texts.items():
        lines = [
            json.dumps({"text": "\n".join(page.paragraphs)}, ensure_ascii=False)
            for page in pages[language]
            if not page.is_test
        ]
        text = "\n".join(lines) + "\n"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)  # a store notices that its text was written anew
    options = LearnOptions(smoothing=SMOOTHING)
    tokenizer = learn_tokenizer(
        [str(path) for path in texts.values()], work / "tokenizer", VOCABULARY, options
    )
    return {
        language: prepare(
            [str(path)],
            tokenizer,
            work / language,
            PrepareOptions(language=language, held_out=0.04),
        )
        for language, path in texts.items()
    }


def main() -> None:
    """Pre-train and fine-tune each network, and write the results file after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manual", type=Path, default=Path("/usr/share/libreoffice/help"))
    parser.add_argument("--work", type=Path, default=Path("runs/languages"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    pages = {one: list(read_pages(arguments.manual, one)) for one in LANGUAGES}
    if empty := [one for one, found in pages.items() if not found]:
        parser.error(f"{arguments.manual} has no pages in {', '.join(empty)}")
    stores = prepare_stores(pages, arguments.work)
    recipe = read_recipe(PretrainRecipe, "two-cores", FLAGS)
    read = {
        "four languages": mix_stores(list(stores.values()), smoothing=SMOOTHING),
        "English only": stores["en"],
    }
    train = task_rows(pages["en"], test=False)
    test = {language: task_rows(found, test=True) for language, found in pages.items()}
    rows = baselines(pages, train, test)
    details: dict[str, Any] = {
        "seeds": arguments.seeds,
        "training_rows": len(train[0]),
        "test_rows": {language: len(labels) for language, (_, labels) in test.items()},
        "tokens": {language: store.tokens for language, store in stores.items()},
        "scores_by_seed": {},
        "held_out": {},
    }
    for name, store in read.items():
        out = arguments.work / name.replace(" ", "-")
        finish_run(recipe, store, out, "two-cores")
        losses = {one: evaluate_held_out(out, recipe, stores[one], phase=2) for one in stores}
        scores: dict[str, list[float]] = {language: [] for language in test}
        for seed in range(1, arguments.seeds + 1):
            classifier = BertClassifier(out, random_state=seed).fit(*train)
            for language, asked in test.items():
                scores[language].append(round(100 * float(classifier.score(*asked)), 2))
            print(name, seed, scores, flush=True)
        rows[name] = {
            f"{language} accuracy percent": summary(values) for language, values in scores.items()
        } | {f"{language} mlm loss": one["mlm_loss"] for language, one in losses.items()}
        details["scores_by_seed"][name], details["held_out"][name] = scores, losses
        print(write_result("question-languages", rows, details), flush=True)


def baselines(
    pages: dict[str, list[Page]], train: Rows, test: dict[str, Rows]
) -> dict[str, dict[str, Any]]:
    """Return rows of TF-IDF from English and from each language, and of the most frequent label."""
    rows: dict[str, dict[str, Any]] = {}
    english = words_model(train)
    for language, asked in test.items():
        own = words_model(task_rows(pages[language], test=False))
        [(_, most)] = Counter(asked[1]).most_common(1)
        accuracies = {
            "TF-IDF": english.score(*asked),
            "TF-IDF, trained on each language": own.score(*asked),
            "most frequent label": most / len(asked[1]),
        }
        for name, accuracy in accuracies.items():
            row = rows.setdefault(name, {})
            row[f"{language} accuracy percent"] = round(100 * float(accuracy), 2)
    return rows


def words_model(rows: Rows) -> Any:
    """Fit a logistic regression on TF-IDF features of words and pairs of words."""
    features = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    return make_pipeline(features, LogisticRegression(max_iter=2_000, C=10.0)).fit(*rows)


if __name__ == "__main__":
    main()
