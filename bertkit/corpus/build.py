"""Prepare a token store from text, as a stream: memory does not grow with the corpus.

The corpus is divided into parts, a part into shards (`steps.py`), the text of a shard into blocks
of documents. Blocks go to worker processes and come back in order; the bytes written do not depend
on the number of processes. Several machines can share a folder: each makes its share of the parts,
and the one that completes the store writes the manifest. The store has the same bytes as one that a
single machine makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bertkit.console import Console, console_or_new
from bertkit.corpus.blocks import tokenize_block
from bertkit.corpus.steps import CorpusPart, PartResult, finished_part, plan_parts, prepare_part
from bertkit.corpus.store import ShardInfo, TokenStore
from bertkit.corpus.writers import write_manifest
from bertkit.errors import BertkitError, HeldError
from bertkit.files import (
    WAIT_SECONDS,
    check_output,
    exclusive_lock,
    from_home,
    read_json,
    write_json,
)
from bertkit.processes import Workers, worker_count
from bertkit.text.documents import TextCounts
from bertkit.text.lines import describe_skipped
from bertkit.text.sentences import check_language
from bertkit.text.sources import Source, find_sources, is_remote, text_paths
from bertkit.tokenizer.wordpiece import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The settings that, with the text and the tokenizer, determine the content of a store."""

    format: str = "auto"
    """text, wikiextractor, jsonl, csv, tsv or parquet; auto uses extensions and first lines."""
    column: str = "text"
    """The column that holds the text, in formats that have columns."""
    language: str = "en"
    """Language code for the sentence splitter; `lines` makes each line one sentence."""
    held_out: float = 0.01
    """Share of documents kept for evaluation, chosen by a hash of their text."""
    shard_megabytes: int = 64
    """Text per shard, in units of 1,000,000 bytes."""

    @property
    def shard_bytes(self) -> int:
        """The bytes of text after which a shard ends."""
        return self.shard_megabytes * 1_000_000


def prepare(
    paths: Sequence[str],
    tokenizer: Tokenizer | Path | str,
    folder: Path | str,
    options: PrepareOptions | None = None,
    *,
    processes: int = 1,
    console: Console | None = None,
) -> TokenStore:
    """Make a token store, or finish one that was interrupted; show progress and what was skipped.

    Args:
        paths: files, folders, globs, URLs or `hf:` data sets; see `find_sources`.
        tokenizer: the tokenizer that converts text to ids, or its path (see `Tokenizer.load`); a
            copy is saved in the store.
        folder: the store's folder; an interrupted run resumes after its last complete shard.
        options: the settings of the store; see `PrepareOptions`.
        processes: the number of worker processes, 0 for one per core; the result is the same for
            any number.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: there is no text, the language is unknown, there are fewer than two training
            documents, the store has other settings, or the disk is full.
    """
    plan = plan_store(paths, tokenizer, folder, options, processes)
    with exclusive_lock(plan.folder), console_or_new(console) as shown:
        claim_store_folder(plan, alone=True)
        shown.start(None, title="preparing", unit="documents")
        store = finish_store(plan, prepare_parts(plan, plan.parts, shown))
        shown.close()
        shown.say(*describe_store(store))
    return store


def prepare_share(
    paths: Sequence[str],
    tokenizer: Tokenizer | Path | str,
    folder: Path | str,
    options: PrepareOptions | None = None,
    *,
    share: str,
    processes: int = 1,
    console: Console | None = None,
) -> TokenStore | None:
    """Make one of several shares of a store, and write the manifest if that completes the store.

    Args:
        paths: as for `prepare`; every machine must see the same files under the same names.
        tokenizer: as for `prepare`.
        folder: the store's folder, on a file system that all machines share.
        options: the settings of the store, the same for all shares.
        share: which share to make, as "2/4" for the second of four. Shares consist of whole parts.
        processes: the number of worker processes of this machine, 0 for one per core.
        console: the console for progress; None for a new one.

    Returns:
        The store, or None while parts of other shares are missing.

    Raises:
        BertkitError: as for `prepare`, or there is no such share, or a part of another share is
            damaged.
    """
    number, shares = read_share(share)
    plan = plan_store(paths, tokenizer, folder, options, processes)
    folder, parts = plan.folder, plan.parts
    with exclusive_lock(folder, WAIT_SECONDS):  # machines may start at the same moment
        claim_store_folder(plan, alone=False)
    with console_or_new(console) as shown:
        shown.start(None, title="preparing", unit="documents")
        # Adjacent parts are often similar, so they go to different shares.
        prepare_parts(plan, parts[number - 1 :: shares], shown)
        shown.close()
        missing = [one for one in parts if finished_part(one, folder, checksums=False) is None]
        if missing:
            shown.say(
                f"{folder}: {len(parts) - len(missing)} of {len(parts)} parts are complete; the "
                "command that completes the last one writes the manifest; if none is running, run "
                f"the one with --share {missing[0].number % shares + 1}/{shares}"
            )
            return None
        try:
            with exclusive_lock(folder, WAIT_SECONDS):  # machines may end at the same moment
                store = merge_parts(plan, shares)
        except HeldError:
            shown.say(f"{folder}: all parts are complete; another process writes the manifest")
            return None
        shown.say(*describe_store(store))
    return store


@dataclass(frozen=True)
class StorePlan:
    """What a store is made of, after all arguments of `prepare` were checked."""

    folder: Path
    tokenizer: Tokenizer
    options: PrepareOptions
    sources: list[Source]
    parts: list[CorpusPart]
    workers: int
    """The number of worker processes; 0 if this process does the work."""


def plan_store(
    paths: Sequence[str],
    tokenizer: Tokenizer | Path | str,
    folder: Path | str,
    options: PrepareOptions | None,
    processes: int,
) -> StorePlan:
    """Check the arguments of `prepare`, find the sources and divide them into parts."""
    options, workers = options or PrepareOptions(), worker_count(processes)
    folder = Path(from_home(folder))
    sources = check_inputs(text_paths(paths), folder, options)
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    check_folder(folder)
    parts = plan_parts(sources, options.shard_bytes)
    return StorePlan(folder, loaded, options, sources, parts, workers)


def read_share(share: str) -> tuple[int, int]:
    """Return the number of a share and of all shares, given as "2/4"."""
    number, _, shares = share.partition("/")
    digits = number.isascii() and number.isdecimal() and shares.isascii() and shares.isdecimal()
    if not digits or not 1 <= int(number) <= int(shares):
        raise BertkitError(
            f"--share takes a share and the number of shares, from 1/4 to 4/4, not {share!r}",
            code="number",
        )
    return int(number), int(shares)


def merge_parts(plan: StorePlan, shares: int) -> TokenStore:
    """Write the manifest if the checksums of every part are right."""
    results = []
    for part in plan.parts:
        result = finished_part(part, plan.folder)
        if result is None:
            raise BertkitError(
                f"part {part.number + 1} of {len(plan.parts)} of {plan.folder} is damaged; run the "
                f"same `bertkit prepare` with --share {part.number % shares + 1}/{shares}, which "
                "makes it again"
            )
        results.append(result)
    return finish_store(plan, results)


def prepare_parts(
    plan: StorePlan, parts: Sequence[CorpusPart], console: Console
) -> list[PartResult]:
    """Make parts of a store on this machine."""
    done = TextCounts()

    def show(counts: TextCounts) -> None:
        documents, size = done.documents + counts.documents, done.bytes + counts.bytes
        console.update({"done": documents, "bytes": size})

    options = plan.options
    work = partial(
        tokenize_block,
        tokenizer=plan.tokenizer,
        language=options.language,
        held_out=options.held_out,
    )
    results = []
    with Workers(work, plan.workers, command="prepare", flag="--processes") as workers:
        for part in parts:
            made = prepare_part(
                *(part, plan.folder, workers),
                column=options.column,
                shard_bytes=options.shard_bytes,
                progress=show,
            )
            results.append(made)
            done += made.text
    return results


def check_inputs(paths: Sequence[str], folder: Path, options: PrepareOptions) -> list[Source]:
    """Check the options and find the sources."""
    check_language(options.language)
    if not 0 <= options.held_out < 1:
        raise BertkitError(f"held_out must be at least 0 and below 1, got {options.held_out}")
    if not 1 <= options.shard_megabytes <= 1000:
        raise BertkitError(f"shard_megabytes must be 1 to 1000, got {options.shard_megabytes}")
    check_output(folder, paths, folder=True)
    return find_sources(paths, format=options.format)


def finish_store(plan: StorePlan, results: Iterable[PartResult]) -> TokenStore:
    """Write the manifest from the results of all parts, in their order."""
    text = TextCounts()
    tokenization: Counter[str] = Counter()
    shards: list[ShardInfo] = []
    for result in results:
        shards += result.shards
        tokenization += result.tokenization
        text += result.text
    documents = sum(shard.documents for shard in shards if shard.split == "train")
    if documents < 2:
        others = f" and {len(plan.sources) - 1} more" if len(plan.sources) > 1 else ""
        raise BertkitError(
            f"{plan.sources[0].path}{others}: {documents} training document(s) found, at least 2 "
            "are needed. In plain text a blank line ends a document; is there one?"
        )
    details = {
        "settings": asdict(plan.options),
        "sources": [asdict(source) for source in plan.sources],
        "text": text.as_dict(),
        "tokenization": dict(tokenization),
    }
    write_manifest(plan.folder, plan.tokenizer, shards, details)
    return TokenStore(plan.folder)


def claim_store_folder(plan: StorePlan, *, alone: bool) -> None:
    """Record in a folder the settings, tokenizer and sources of its store.

    If no other process works there (`alone`), settings that made no shard may be replaced.
    """
    settings: dict[str, Any] = {
        **asdict(plan.options),
        "tokenizer_hash": plan.tokenizer.content_hash,
        "sources": source_records(plan.sources),
    }
    folder = plan.folder
    path = folder / "settings.json"
    check_folder(folder)
    if path.is_file():
        begun = read_json(path)
        if not isinstance(begun, dict):
            raise BertkitError(f"{path} is damaged; remove the store and prepare it again")
        changed = [key for key in settings if begun.get(key) != settings[key]]
        made = (folder / "manifest.json").is_file() or any(folder.glob("parts/*.json"))
        if changed and (made or not alone):
            raise BertkitError(
                f"store {folder} was made with other {', '.join(changed)}; choose another folder, "
                "or remove this one"
            )
    write_json(path, settings)
    plan.tokenizer.save(folder / "tokenizer")


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not empty and does not hold a store."""
    used = folder.is_dir() and any(entry.name[0] != "." for entry in folder.iterdir())
    if used and not (folder / "settings.json").is_file():  # last, as a host may just be writing it
        raise BertkitError(f"{folder} is not empty and not a token store; choose another folder")


def source_records(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return what a store records of its sources, from which a changed text is recognised."""
    return [{**asdict(source), "modified": modification_time(source)} for source in sources]


def modification_time(source: Source) -> int | None:
    """Return when a local source was last changed, in nanoseconds: an edited file is a new text."""
    path = Path(source.path)
    return path.stat().st_mtime_ns if path.is_file() else None


def text_changed(paths: Sequence[str], folder: Path, options: PrepareOptions) -> bool:
    """Return whether local text is no longer that of a store; False if some of it is not here."""
    if any(is_remote(path) or path.startswith("hf:") for path in text_paths(paths)):
        return False
    try:
        found = source_records(find_sources(paths, format=options.format))
        return bool(read_json(folder / "settings.json").get("sources") != found)
    except (BertkitError, AttributeError):
        return False


def describe_store(store: TokenStore) -> list[str]:
    """Return lines that say what a store holds and what was skipped."""
    held_out = TokenStore(store.folder, "held_out")
    unknown = store.unigrams[store.tokenizer.unk_id] / max(1, store.tokens)
    lines = [
        f"{store.folder}: {store.documents:,} documents, {store.sentences:,} sentences, "
        f"{store.tokens:,} tokens for training; {held_out.documents:,} documents, "
        f"{held_out.tokens:,} tokens held out; [UNK] is {unknown:.3%} of tokens"
    ]
    text = store.manifest["text"]
    skipped = {**text["skipped"], **store.manifest["tokenization"]}
    return [*lines, *describe_skipped(skipped, text.get("examples", {}))]
