"""`bertkit pretrain`: train a model from text or a token store, in one command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bertkit.cli.learn import learn_tokenizer
from bertkit.cli.prepare import make_store
from bertkit.config import FLATTEN, as_json, claim_settings
from bertkit.corpus.build import PrepareOptions, check_inputs
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import exclusive_lock
from bertkit.outputs import FOLDER, NAMED, OWN, TEXT
from bertkit.processes import is_alone, rank
from bertkit.report.pretraining import write_report
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.journal import JOURNAL, Console, read_journal
from bertkit.training.recipe import PretrainRecipe

RECIPE_DEFAULTS = PretrainRecipe()


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options of a run that starts from text instead of a store."""

    text: Annotated[tuple[str, ...], TEXT] = ()
    """Text to train on: files, folders, globs, URLs, hf:NAME (instead of --store)."""
    tokenizer: Path | None = None
    """An existing tokenizer for --text; without it, a vocabulary is learned."""
    vocabulary_size: int = 30522
    """Size of the vocabulary that is learned from --text."""
    cased: bool = False
    """Whether the learned vocabulary keeps upper case and accents."""
    language: str = "en"
    """Language of --text, for the sentence splitter."""
    format: str = "auto"
    """Format of --text; auto detects it from file names and first lines."""
    column: str = "text"
    """Column of --text that holds the text, in formats that have columns."""
    processes: int = 0
    """Worker processes for preparing --text; 0 uses one for each core."""


NO_TEXT = TextOptions()


def pretrain_command(
    recipe: Annotated[str, NAMED],
    *,
    out: Annotated[Path, FOLDER],
    store: Annotated[tuple[str, ...], OWN] = (),
    cache: Annotated[Path | None, FOLDER] = None,
    cache_gigabytes: float | None = None,
    smoothing: float | None = None,
    weights: tuple[float, ...] = (),
    corpus: Annotated[TextOptions, FLATTEN] = NO_TEXT,
    init_from: Path | None = None,
    workers: int = 0,
    device: str = "auto",
    compile: bool = False,  # noqa: A002 - the flag's natural name
    strategy: str = "ddp",
    timeout: float = 600.0,
    track: tuple[str, ...] = ("tensorboard",),
    settings: Annotated[PretrainRecipe, FLATTEN] = RECIPE_DEFAULTS,
) -> int:
    """Pre-train a BERT from text or a token store.

    Run the same command again to resume a stopped run. Ctrl-C saves a checkpoint and stops.

    Parameters
    ----------
    recipe
        A shipped recipe (such as base, large, small, two-cores, no-nsp, albert-base; a wrong name
        lists all) or a .toml file. The dotted flags below override its fields; the defaults shown
        are for fields that it leaves out.
    out
        The run directory.
    store
        A token store made by `bertkit prepare`, or several with the same tokenizer; folders or
        URLs (https, s3, ...).
    cache
        The folder that keeps shards downloaded from a store's URL while they are needed.
    cache_gigabytes
        The maximum size of that cache.
    smoothing
        For several stores, the exponent S: a store with the share p of all tokens gets a share of
        the examples proportional to p**S, from 1 (proportional, the default) to 0 (equal shares).
    weights
        For several stores: their shares of the examples, instead of smoothing.
    init_from
        A model to take the weights and sizes from; the store must have its tokenizer.
    workers
        The number of loader processes; 0 suits CPUs.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    compile
        Compile the layers (CUDA only); the first update of each batch shape waits for the compiler.
    strategy
        With several processes (bertkit launch): ddp, or fsdp for a network too large for one.
    timeout
        With several processes: the seconds to wait for another process before giving up.
    track
        Trackers that receive the journal's records: tensorboard (if it is installed), wandb,
        mlflow.
    """
    from bertkit.training.device import choose_device, choose_precision
    from bertkit.training.pretrain import pretrain as pretrain_store

    if corpus.text and not is_alone():
        raise BertkitError(
            "several processes cannot start from --text; make a store with `bertkit prepare` once "
            "and give --store"
        )
    if bool(store) == bool(corpus.text):
        raise BertkitError("say where the text is: either --store STORE or --text PATHS")
    if store and corpus != NO_TEXT:
        raise BertkitError("--store holds a tokenizer and text already; leave out the other flags")
    if (cache or cache_gigabytes is not None) and not any("://" in place for place in store):
        raise BertkitError("--cache and --cache-gigabytes are for stores with an address")
    if len(store) < 2 and (smoothing is not None or weights):
        raise BertkitError("--smoothing and --weights need several stores: --store FIRST SECOND")
    choose_precision(settings.training.precision, choose_device(device))  # before hours of work
    with Console() as console:
        max_length, positions = max(settings.phases.lengths), settings.model.max_position_embeddings
        if max_length < positions and init_from is None:
            console.say(
                f"examples have at most {max_length} tokens, so the last "
                f"{positions - max_length} of the model's {positions} positions are never trained "
                "(--model.max-position-embeddings)"
            )
        stopped_by = pretrain_store(
            settings,
            open_stores(store, smoothing, weights, cache, cache_gigabytes)
            if store
            else locked_store_from_text(corpus, out, console),
            out,
            recipe_name=Path(recipe).stem,
            init_from=init_from,
            workers=workers,
            device=device,
            compiled=compile,
            strategy=strategy,
            timeout=timeout,
            console=console,
            track=track,
        )
        if not rank() and has_steps(out / JOURNAL):
            console.say(f"report: {write_report(out)}")
    return 0 if stopped_by is None else 128 + stopped_by


def has_steps(journal: Path) -> bool:
    """Whether a journal has training steps to report, unless stopped before the first update."""
    return journal.is_file() and any(r["kind"] == "step" for r in read_journal(journal))


def open_stores(
    places: Sequence[str],
    smoothing: float | None,
    weights: Sequence[float],
    cache: Path | None,
    cache_gigabytes: float | None,
) -> TokenStore:
    """Open one token store, or several as a mixture.

    Raises:
        BertkitError: a store cannot be opened, or see `mixture.mix_stores`.
    """
    stores = [TokenStore(place, cache=cache, cache_gigabytes=cache_gigabytes) for place in places]
    if len(stores) == 1:
        return stores[0]
    from bertkit.pretraining_data.mixture import mix_stores

    return mix_stores(stores, smoothing=smoothing, weights=weights)


def locked_store_from_text(corpus: TextOptions, out: Path, console: Console) -> TokenStore:
    """Run `store_from_text` while the run directory is locked against other processes."""
    with exclusive_lock(out):
        return store_from_text(corpus, out, console)


def store_from_text(corpus: TextOptions, out: Path, console: Console) -> TokenStore:
    """Learn a vocabulary and prepare a store inside the run directory, unless already done.

    Raises:
        BertkitError: the directory was started with other text or flags, or they are invalid.
    """
    if corpus.processes < 0:
        raise BertkitError(f"--processes must be 0 or more, got {corpus.processes}")
    if corpus.tokenizer is not None and (corpus.vocabulary_size, corpus.cased) != (
        NO_TEXT.vocabulary_size,
        NO_TEXT.cased,
    ):
        raise BertkitError(
            "--vocabulary-size and --cased are for a vocabulary that is learned; remove them, "
            "or remove --tokenizer"
        )
    options = PrepareOptions(format=corpus.format, column=corpus.column, language=corpus.language)
    if not (out / "store" / "manifest.json").is_file():
        check_inputs(corpus.text, out / "store", options)  # before these flags are written down
    flags = {k: v for k, v in as_json(corpus).items() if k != "processes"}
    if not any((out / name).exists() for name in ("tokenizer", "store")):
        (out / "corpus.json").unlink(missing_ok=True)  # left by flags that failed
    claim_settings(out / "corpus.json", flags, "a corpus")
    if corpus.tokenizer is not None:
        tokenizer = Tokenizer.load(corpus.tokenizer)
    elif (out / "tokenizer" / "tokenizer_config.json").is_file():
        tokenizer = Tokenizer.load(out / "tokenizer")
    else:
        tokenizer = learn_tokenizer(
            corpus.text,
            corpus.vocabulary_size,
            console,
            cased=corpus.cased,
            format=corpus.format,
            column=corpus.column,
        )
        tokenizer.save(out / "tokenizer")
    if (out / "store" / "manifest.json").is_file():
        store = TokenStore(out / "store")
        store.check_tokenizer(tokenizer, str(corpus.tokenizer or out / "tokenizer"))
        return store
    return make_store(
        list(corpus.text), tokenizer, out / "store", options, corpus.processes, console
    )
