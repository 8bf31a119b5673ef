"""Checks of a token store: damage, duplicates, an unsuitable vocabulary, unusable documents.

Every token is read once. The limits of each finding are in `findings.py`. The checks target the
causes of failed pre-training that issues such as google-research/bert#746 report: duplicate lines,
and text without document or sentence boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from bertkit.console import Console
from bertkit.corpus.store import REPAIR, TokenStore
from bertkit.doctor.copies import LONG_SENTENCE, SHARD_BITS, SHORT_SENTENCE, Scan, Tally, scan
from bertkit.doctor.findings import Finding, judge_value, make_finding, pair_findings, percent
from bertkit.errors import BertkitError
from bertkit.pretraining_data.pairs import PairOptions, measure_pairs, plan_block
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

CheckResult = TypeVar("CheckResult")

DRAWING = ("nsp", "none")
"""The values of `PairOptions.pair` that draw random next sentences from other documents."""
PAIR_LENGTH = 128
"""The length of the examples that are checked: that of the paper's first phase (A.2)."""
SHOWN_CHARACTERS = 60
"""The maximum number of characters of a quoted sentence."""


def is_store(path: Path) -> bool:
    """Return whether a folder is a token store; an unfinished or damaged one counts, too."""
    begun = (path / "settings.json").is_file() and (path / "parts").is_dir()
    return begun or (path / "manifest.json").is_file()


def check_store(path: Path, console: Console, pair: str = "nsp") -> list[Finding]:
    """Return all findings about a token store; damage is reported as a finding, not raised."""
    try:
        train, held_out = TokenStore(path), TokenStore(path, "held_out")
    except BertkitError as error:
        return [make_finding("files", "problem", {"damaged": 1}, str(error))]
    seen, kept = scan(train, console), scan(held_out, console)
    tokenizer, findings = check_files(train, seen, kept)
    findings += check_store_sizes(seen, pair)
    findings += check_held_out(seen, kept)
    if seen.documents:
        findings += check_copies(train, seen, tokenizer)
        findings += check_shapes(seen, pair)
        findings += check_vocabulary_use(train, tokenizer)
        findings += check_pairs(train, seen.whole, pair)
    return findings


def try_check(read: Callable[[], CheckResult]) -> tuple[CheckResult | None, str]:
    """Return (value, "") if reading succeeds, else (None, error message)."""
    try:
        return read(), ""
    except (BertkitError, ValueError, OSError) as error:
        return None, str(error)


def check_files(
    store: TokenStore, seen: Scan, kept: Scan
) -> tuple[Tokenizer | None, list[Finding]]:
    """Check the files' integrity, and that the tokenizer is the one recorded in the manifest.

    Returns:
        The tokenizer, or None if it is damaged or not the recorded one, and the findings.
    """
    tokenizer, wrong = try_check(lambda: store.tokenizer)
    _, torn = try_check(lambda: store.unigrams)
    damaged = [*seen.damaged, *kept.damaged, *([torn] if torn else [])]
    whole = len(seen.whole) + len(kept.whole)
    said = f"{whole:,} shards have the sizes and checksums recorded in the manifest"
    if damaged:
        said = f"{len(damaged):,} damaged, {whole:,} shards intact; first damage: {damaged[0]}"
    files = make_finding(
        "files",
        "problem" if damaged else "ok",
        {"damaged": len(damaged), "whole_shards": whole},
        said,
        f"{REPAIR}; until then the findings below do not cover the damaged files",
    )
    same = f"the store was made with the tokenizer in tokenizer/ ({store.vocabulary_size:,} tokens)"
    tokens = make_finding(
        "tokenizer",
        "problem" if wrong else "ok",
        {"vocabulary_size": store.vocabulary_size},
        wrong or same,
        "restore the store's tokenizer folder, or run `bertkit prepare` on the text again",
    )
    return tokenizer, [files, tokens]


def check_store_sizes(seen: Scan, pair: str) -> list[Finding]:
    """Check that there is enough text, in enough documents, none of which dominates."""
    draws = pair in DRAWING
    purpose = ", from which random next sentences are drawn" if draws else ""
    findings = [
        judge_value(
            "corpus-size",
            seen.tokens,
            {"tokens": seen.tokens},
            f"{seen.tokens:,} training tokens",
            "add more text: a network of millions of parameters memorizes a corpus this small",
        ),
        judge_value(
            "documents",
            seen.documents,
            {"documents": seen.documents},
            f"{seen.documents:,} training documents{purpose}",
            "check that blank lines separate the documents of plain text; otherwise add more text",
        ),
    ]
    if seen.documents and draws:
        share = seen.largest / seen.tokens
        findings.append(
            judge_value(
                "largest-document",
                share,
                {"share": share, "tokens": seen.largest},
                f"the largest document holds {percent(share)} of the tokens ({seen.largest:,})",
                "separate its documents by blank lines (or by the format's separator): random next "
                "sentences are only drawn from other documents",
            )
        )
    return findings


def check_held_out(seen: Scan, kept: Scan) -> list[Finding]:
    """Check that the held-out split is large enough, and that it is not also training text."""
    usable = kept.documents > 1
    said = f"{kept.documents:,} documents, {kept.tokens:,} tokens are held out for evaluation"
    findings = [
        judge_value(
            "held-out-size",
            kept.tokens if usable else 0,
            {"documents": kept.documents, "tokens": kept.tokens},
            said if usable else f"{said}; fewer than two documents, so no evaluation is made",
            "run `bertkit prepare` with a larger --held-out, or add more text",
        )
    ]
    comparable = kept.copies.hashes[seen.copies.is_sampled(kept.copies.hashes)]
    if len(comparable):
        share = float(np.isin(comparable, seen.copies.hashes).mean())
        findings.append(
            judge_value(
                "held-out-copies",
                share,
                {"share": share, "compared": len(comparable)},
                f"{percent(share)} of {len(comparable):,} distinct held-out documents are also "
                "training documents",
                "remove the copies, whose text differs only in what the tokenizer ignores (case, "
                "white space): with them the held-out loss is too low",
            )
        )
    return findings


def check_copies(store: TokenStore, seen: Scan, tokenizer: Tokenizer | None) -> list[Finding]:
    """Check for duplicate documents and for sentences that are repeated many times."""
    copies, repeats = seen.copies, seen.repeats
    share = copies.copied_tokens / copies.all_tokens
    of_documents = copies.copies / copies.texts
    duplicates = judge_value(
        "duplicate-documents",
        max(share, of_documents),
        {"documents": of_documents, "tokens": share, "looked_at": copies.looked_at},
        f"{percent(of_documents)} of documents, with {percent(share)} of the tokens, are exact "
        f"copies of earlier ones ({copies.looked_at} compared)",
        "remove the copies, for example with `bertkit clean`: the network memorizes them, and the "
        "training loss no longer shows how well it generalizes",
    )
    if not repeats.texts:
        return [duplicates]
    share = repeats.copied_tokens / repeats.all_tokens
    most, quoted = int(repeats.counts.max()), most_common_sentence(store, repeats, tokenizer)
    repeated = judge_value(
        "repeated-sentences",
        share,
        {"tokens": share, "most": most, "sentence": quoted, "looked_at": repeats.looked_at},
        f"{percent(share)} of the tokens in sentences of at least {SHORT_SENTENCE} tokens are in "
        f"copies of earlier sentences ({repeats.looked_at} compared); the most frequent sentence "
        f"occurs {most:,} times" + (f': "{quoted}"' if quoted and most > 1 else ""),
        "remove boilerplate (menus, licences, templates) and copied lines before `bertkit prepare`",
    )
    return [duplicates, repeated]


def most_common_sentence(store: TokenStore, repeats: Tally, tokenizer: Tokenizer | None) -> str:
    """Return the beginning of the most frequent sentence, or "" without a tokenizer."""
    if tokenizer is None:
        return ""
    place = int(repeats.places[repeats.counts.argmax()])
    arrays = store.arrays(place >> SHARD_BITS)
    first, stop = arrays.sentences[place & ((1 << SHARD_BITS) - 1) :][:2].tolist()
    text = tokenizer.decode(arrays.tokens[first:stop].tolist())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def check_shapes(seen: Scan, pair: str) -> list[Finding]:
    """Check for documents that are too short, and sentences that are too long, to form pairs."""
    single, long = seen.single / seen.documents, seen.long_tokens / seen.tokens
    findings = [
        judge_value(
            "one-sentence-documents",
            single,
            {"share": single},
            f"{percent(single)} of {seen.documents:,} documents have only one sentence, so their "
            "next sentence is always random",
            "join lines that belong together into documents (in plain text only a blank line ends "
            "a document), or split sentences (`bertkit prepare --language`)",
        ),
        judge_value(
            "long-sentences",
            long,
            {"share": long},
            f"{percent(long)} of tokens are in sentences of more than {LONG_SENTENCE} tokens",
            "split sentences by running `bertkit prepare` with the --language of the text, and "
            "check that the text has punctuation",
        ),
    ]
    return findings if pair == "nsp" else findings[1:]


def check_vocabulary_use(store: TokenStore, tokenizer: Tokenizer | None) -> list[Finding]:
    """Check by its token counts that the vocabulary suits this text."""
    counts, _ = try_check(lambda: store.unigrams)
    if counts is None or tokenizer is None or not counts.sum():
        return []
    total = int(counts.sum())
    unknown = float(counts[tokenizer.unk_id] / total)
    words = int(counts[~tokenizer.continuation].sum())
    fertility = total / max(1, words)
    ordinary = np.array(  # text contains neither special nor [unused...] tokens
        [not (t in SPECIAL_TOKENS or t.startswith("[unused")) for t in tokenizer.vocabulary]
    )
    unused = float((counts[ordinary] == 0).mean()) if ordinary.any() else 0.0
    learn = "learn a vocabulary from this text (`bertkit learn`), or use one of its language"
    return [
        judge_value(
            "unknown-tokens",
            unknown,
            {"share": unknown},
            f"{percent(unknown)} of training tokens are [UNK]",
            f"the vocabulary lacks characters of the text: {learn}",
        ),
        judge_value(
            "fertility",
            fertility,
            {"tokens_a_word": fertility},
            f"{fertility:.2f} tokens per word (punctuation marks count as words)",
            f"the vocabulary splits words into too many tokens: {learn}, or a larger one",
        ),
        judge_value(
            "unused-vocabulary",
            unused,
            {"share": unused, "tokens": int(ordinary.sum())},
            f"{percent(unused)} of {int(ordinary.sum()):,} tokens of the vocabulary never occur in "
            "the training text",
            f"the embeddings of these tokens are never trained: {learn}, or a smaller one",
        ),
    ]


def check_pairs(store: TokenStore, shards: list[int], pair: str) -> list[Finding]:
    """Check the examples made from the first undamaged shards that together have two documents."""
    documents = np.cumsum([store.shards[shard].documents for shard in shards])
    if not len(documents) or documents[-1] < 2:
        return []
    chosen = shards[: int((documents < 2).sum()) + 1]
    rows = plan_block(store, chosen, PairOptions(max_length=PAIR_LENGTH, pair=pair), 0, 0, 0)
    measured = measure_pairs(rows)
    where = f"{measured.examples:,} examples of length {PAIR_LENGTH}"
    where += "" if len(chosen) == len(store.shards) else " (from the start of the corpus)"
    return pair_findings(measured.random_share, measured.cut_share, where, pair)
