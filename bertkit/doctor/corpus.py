"""What is wrong with a token store: damage, copies, a foreign vocabulary, documents of no use.

Every token is read once. The limits behind each finding stand in `findings.py`; what makes a
corpus fail in pre-training is the experience of google-research/bert#746 and its kin: duplicate
lines, and text that has no documents or sentences.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.doctor.copies import LONG_SENTENCE, SHARD_BITS, SHORT_SENTENCE, Scan, Tally, scan
from bertkit.doctor.findings import Finding, judge_value, make_finding, percent
from bertkit.doctor.pairs import check_pairs
from bertkit.errors import BertkitError
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from bertkit.training.journal import Console

CheckResult = TypeVar("CheckResult")

DRAWING = ("nsp", "none")
"""Pair objectives whose examples take random next sentences from other documents."""
SHOWN_CHARACTERS = 60
"""Of a sentence that is quoted."""


def is_store(path: Path) -> bool:
    """Whether a folder is a token store: finished, unfinished or damaged."""
    begun = (path / "settings.json").is_file() and (path / "parts").is_dir()
    return begun or (path / "manifest.json").is_file()


def check_store(path: Path, console: Console, pair: str = "nsp") -> list[Finding]:
    """All findings about a token store; damage gives findings, not an error.

    Args:
        path: its folder.
        console: shows progress.
        pair: the pair objective, as in `PairOptions`; what does not matter
            for them is left out.
    """
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
    """(value, "") or (None, what is wrong)."""
    try:
        return read(), ""
    except (BertkitError, ValueError, OSError) as error:
        return None, str(error)


def check_files(
    store: TokenStore, seen: Scan, kept: Scan
) -> tuple[Tokenizer | None, list[Finding]]:
    """Checksums, and whether the tokenizer is the one of the manifest; returns it if so."""
    tokenizer, wrong = try_check(lambda: store.tokenizer)
    if tokenizer is not None and tokenizer.size != store.vocabulary_size:
        wrong = f"tokenizer/ has {tokenizer.size:,} pieces, the manifest {store.vocabulary_size:,}"
        tokenizer = None
    damaged = [*seen.damaged, *kept.damaged, try_check(lambda: store.unigrams)[1]]
    damaged = [line for line in damaged if line]
    whole = len(seen.whole) + len(kept.whole)
    said = f"{whole:,} shards have the sizes and checksums of the manifest"
    if damaged:
        said = f"{len(damaged):,} damaged, {whole:,} shards whole; the first: {damaged[0]}"
    files = make_finding(
        "files",
        "problem" if damaged else "ok",
        {"damaged": len(damaged), "whole_shards": whole},
        said,
        "run the same `bertkit prepare` again, which remakes what is damaged; until then the "
        "findings below leave it out",
    )
    same = f"tokenizer/ is the one that made the store ({store.vocabulary_size:,} pieces)"
    pieces = make_finding(
        "tokenizer",
        "problem" if wrong else "ok",
        {"vocabulary_size": store.vocabulary_size},
        wrong or same,
        "restore the store's tokenizer folder, or prepare the text again",
    )
    return tokenizer, [files, pieces]


def check_store_sizes(seen: Scan, pair: str = "nsp") -> list[Finding]:
    """Whether there is enough text, in enough documents of comparable size."""
    draws = pair in DRAWING
    purpose = ", from which random next sentences are drawn" if draws else ""
    findings = [
        judge_value(
            "corpus-size",
            seen.tokens,
            {"tokens": seen.tokens},
            f"{seen.tokens:,} training tokens",
            "give more text: a network of millions of parameters learns so little by heart",
        ),
        judge_value(
            "documents",
            seen.documents,
            {"documents": seen.documents},
            f"{seen.documents:,} training documents{purpose}",
            "in plain text a blank line ends a document: is there one? Else give more text",
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
                "put blank lines (or the format's own marks) between its documents: inside one "
                "document no random next sentence is drawn",
            )
        )
    return findings


def check_held_out(seen: Scan, kept: Scan) -> list[Finding]:
    """Whether what is held out can measure anything."""
    usable = kept.documents > 1
    said = f"{kept.documents:,} documents, {kept.tokens:,} tokens are held out for evaluation"
    findings = [
        judge_value(
            "held-out-size",
            kept.tokens if usable else 0,
            {"documents": kept.documents, "tokens": kept.tokens},
            said if usable else f"{said}; fewer than two documents, so no evaluation is made",
            "prepare with a larger --held-out, or give more text",
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
                f"{percent(share)} of {len(comparable):,} different held-out documents are also "
                "training documents",
                "their texts differ only in what the tokenizer ignores (case, white space): remove "
                "the copies from the text, else the held-out loss flatters",
            )
        )
    return findings


def check_copies(store: TokenStore, seen: Scan, tokenizer: Tokenizer | None) -> list[Finding]:
    """Documents that came before, and sentences that are everywhere."""
    copies, repeats = seen.copies, seen.repeats
    share = copies.copied_tokens / copies.all_tokens
    of_documents = copies.copies / copies.texts
    duplicates = judge_value(
        "duplicate-documents",
        max(share, of_documents),
        {"documents": of_documents, "tokens": share, "looked_at": copies.looked_at},
        f"{percent(of_documents)} of documents, with {percent(share)} of the tokens, are exact "
        f"copies of earlier ones ({copies.looked_at} compared)",
        "remove the copies from the text: the network learns them by heart, and the loss says "
        "less and less",
    )
    if not repeats.texts:
        return [duplicates]
    share = repeats.copied_tokens / repeats.all_tokens
    most, quoted = int(repeats.counts.max()), most_common_sentence(store, repeats, tokenizer)
    repeated = judge_value(
        "repeated-sentences",
        share,
        {"tokens": share, "most": most, "sentence": quoted, "looked_at": repeats.looked_at},
        f"{percent(share)} of the tokens of sentences of {SHORT_SENTENCE} and more are in copies "
        f"of earlier ones ({repeats.looked_at} compared); the commonest comes {most:,} times"
        + (f': "{quoted}"' if quoted and most > 1 else ""),
        "remove what is no text (menus, licences, templates) and copied lines before preparing",
    )
    return [duplicates, repeated]


def most_common_sentence(store: TokenStore, repeats: Tally, tokenizer: Tokenizer | None) -> str:
    """The beginning of the sentence that comes most often."""
    if tokenizer is None:
        return ""
    place = int(repeats.places[repeats.counts.argmax()])
    arrays = store.arrays(place >> SHARD_BITS)
    first, stop = arrays.sentences[place & ((1 << SHARD_BITS) - 1) :][:2].tolist()
    text = tokenizer.decode(arrays.tokens[first:stop].tolist())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def check_shapes(seen: Scan, pair: str = "nsp") -> list[Finding]:
    """Documents too short, and sentences too long, to make pairs of."""
    single, long = seen.single / seen.documents, seen.long_tokens / seen.tokens
    findings = [
        judge_value(
            "one-sentence-documents",
            single,
            {"share": single},
            f"{percent(single)} of {seen.documents:,} documents have one sentence, which can only "
            "be followed by a random one",
            "join lines that belong together into documents (in plain text only a blank line ends "
            "one), or split sentences (prepare --language)",
        ),
        judge_value(
            "long-sentences",
            long,
            {"share": long},
            f"{percent(long)} of tokens are in sentences of more than {LONG_SENTENCE} tokens",
            "sentences were not split: prepare with the --language of the text, and check that it "
            "has punctuation",
        ),
    ]
    return findings if pair == "nsp" else findings[1:]


def check_vocabulary_use(store: TokenStore, tokenizer: Tokenizer | None) -> list[Finding]:
    """Whether the vocabulary is made for this text, by the counts of its pieces."""
    counts, _ = try_check(lambda: store.unigrams)
    if counts is None or tokenizer is None or not counts.sum():
        return []
    total = int(counts.sum())
    unknown = float(counts[tokenizer.unk_id] / total)
    words = int(counts[~tokenizer.continuation].sum())
    fertility = total / max(1, words)
    spare = {index for index, piece in enumerate(tokenizer.vocabulary) if is_spare(piece)}
    ordinary = np.array([index not in spare for index in range(tokenizer.size)])
    unused = float((counts[ordinary] == 0).mean()) if ordinary.any() else 0.0
    learn = "learn a vocabulary from this text (bertkit learn), or take one of its language"
    return [
        judge_value(
            "unknown-pieces",
            unknown,
            {"share": unknown},
            f"{percent(unknown)} of training tokens are [UNK]",
            f"the vocabulary lacks characters of the text: {learn}",
        ),
        judge_value(
            "fertility",
            fertility,
            {"pieces_a_word": fertility},
            f"{fertility:.2f} pieces a word (punctuation marks are words)",
            f"the vocabulary breaks words into crumbs: {learn}, or a larger one",
        ),
        judge_value(
            "unused-vocabulary",
            unused,
            {"share": unused, "pieces": int(ordinary.sum())},
            f"{percent(unused)} of {int(ordinary.sum()):,} pieces never come in the training text",
            f"their embeddings are never trained: {learn}, or a smaller one",
        ),
    ]


def is_spare(piece: str) -> bool:
    """Whether a piece is not meant to be in text."""
    return piece in SPECIAL_TOKENS or piece.startswith("[unused")
