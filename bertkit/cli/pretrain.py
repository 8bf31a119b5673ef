"""`bertkit pretrain`: train a model from text or a token store, in one command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from bertkit.cli.options import NO_TEXT, Device, TextFlags
from bertkit.config import FLATTEN, read_recipe
from bertkit.console import Console
from bertkit.corpus.prepare import store_from_text
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, flag
from bertkit.files import check_output
from bertkit.processes import is_alone, rank
from bertkit.report.pretraining import write_report
from bertkit.text.sources import TextSource
from bertkit.training.journal import JOURNAL, read_journal
from bertkit.training.recipe import PretrainRecipe

RECIPE_DEFAULTS = PretrainRecipe()


def pretrain_command(
    recipe: str,
    *,
    out: Path,
    store: tuple[str, ...] = (),
    smoothing: float | None = None,
    weights: tuple[float, ...] = (),
    corpus: Annotated[TextFlags, FLATTEN] = NO_TEXT,
    init_from: Path | None = None,
    workers: int | None = None,
    device: Device = "auto",
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
        A token store made by `bertkit prepare`, or several with the same tokenizer.
    smoothing
        For several stores, the exponent S: a store with the share p of all tokens gets a share of
        the examples proportional to p**S, from 1 (proportional, the default) to 0 (equal shares).
    weights
        For several stores: their shares of the examples, instead of smoothing.
    init_from
        A model to take the weights and sizes from: a directory, or a name on the Hugging Face hub.
        --text is tokenized with its tokenizer, and a --store must have been made with it.
    workers
        The number of loader processes: by default 0 on a CPU, and up to 4 on a GPU.
    compile
        Compile layers, head and losses (CUDA only); the first update waits for the compiler.
    strategy
        With several processes (bertkit launch): ddp, or fsdp for a network too large for one.
    timeout
        With several processes: the seconds to wait for another process before giving up.
    track
        Trackers that receive the journal's records: tensorboard (if it is installed), wandb,
        mlflow.
    """
    from bertkit.training.device import choose_device, choose_precision
    from bertkit.training.parallel import check_compiler
    from bertkit.training.pretrain import check_options
    from bertkit.training.pretrain import pretrain as pretrain_store

    check_corpus_flags(store, corpus, smoothing, weights)
    on = choose_device(device)  # what cannot work is refused before hours of preparation
    choose_precision(settings.training.precision, on)
    if compile:
        check_compiler(on)
    check_options(settings, strategy=strategy, workers=workers, timeout=timeout, track=track)
    out = check_output(out, corpus.text, folder=True)
    if init_from is not None:
        corpus = check_start(init_from, recipe, settings, corpus)
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
            open_stores(store, smoothing, weights) if store else corpus_store(corpus, out, console),
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


def check_start(
    init_from: Path, recipe: str, settings: PretrainRecipe, corpus: TextFlags
) -> TextFlags:
    """Check the model of --init-from before the text is read; return the corpus with a tokenizer.

    Raises:
        BertkitError: the model does not fit (see `check_initial_model`), or a flag gives a size,
            which would have no effect.
    """
    from bertkit.checkpoints.pretrained import read_pretrained, tokenizer_folder
    from bertkit.tokenizer.wordpiece import Tokenizer
    from bertkit.training.state import check_initial_model

    sizes = vars(read_recipe(PretrainRecipe, recipe).model)
    for name, value in vars(settings.model).items():
        if value != sizes[name] and name not in ("dropout", "max_position_embeddings"):
            raise BertkitError(
                f"{flag(f'model.{name}')} has no effect with --init-from, since the sizes "
                "are those of the model; leave it out"
            )
    if corpus.text and corpus.tokenizer is None:
        corpus = replace(corpus, tokenizer=tokenizer_folder(init_from))
    found = read_pretrained(init_from)
    given = found.tokenizer if corpus.tokenizer is None else Tokenizer.load(corpus.tokenizer)
    check_initial_model(found, settings, given)
    return corpus


def check_corpus_flags(
    store: Sequence[str],
    corpus: TextFlags,
    smoothing: float | None,
    weights: Sequence[float],
) -> None:
    """Check that the flags name one corpus, and that none of them would have no effect.

    Raises:
        BertkitError: they do not; the message names the flags.
    """
    if corpus.text and not is_alone():
        raise BertkitError(
            "several processes cannot start from --text; make a store with `bertkit prepare` once "
            "and give --store"
        )
    if bool(store) == bool(corpus.text):
        raise BertkitError("say where the text is: either --store STORE or --text PATHS")
    if store and corpus != NO_TEXT:
        flags = [flag(n) for n, v in vars(corpus).items() if v != vars(NO_TEXT)[n]]
        raise BertkitError(f"--store holds tokenized text already; leave out {', '.join(flags)}")
    if len(store) < 2 and (smoothing is not None or weights):
        raise BertkitError("--smoothing and --weights need several stores: --store FIRST SECOND")


def corpus_store(corpus: TextFlags, out: Path, console: Console) -> TokenStore:
    """Learn a vocabulary from --text, unless a tokenizer is named, and prepare a store."""
    return store_from_text(
        TextSource(corpus.text, corpus.format, corpus.column, corpus.language),
        out,
        tokenizer=corpus.tokenizer,
        vocabulary_size=corpus.vocabulary_size,
        cased=corpus.cased,
        processes=corpus.processes,
        console=console,
    )


def has_steps(journal: Path) -> bool:
    """Return whether a journal has training steps; a run may stop before its first update."""
    return journal.is_file() and any(r["kind"] == "step" for r in read_journal(journal))


def open_stores(
    places: Sequence[str],
    smoothing: float | None,
    weights: Sequence[float],
) -> TokenStore:
    """Open one token store, or several as a mixture.

    Raises:
        BertkitError: a store cannot be opened, or see `mixture.mix_stores`.
    """
    stores = [TokenStore(place) for place in places]
    if len(stores) == 1:
        return stores[0]
    from bertkit.pretraining_data.mixture import mix_stores

    return mix_stores(stores, smoothing=smoothing, weights=weights)
