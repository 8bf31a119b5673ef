"""`bertkit pretrain`: train a model from text or a token store, in one command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bertkit.cli.options import FLATTEN, NO_TEXT, Device, TextFlags
from bertkit.config import read_recipe
from bertkit.console import Console
from bertkit.corpus.prepare import store_from_text
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, flag
from bertkit.files import check_output
from bertkit.processes import is_alone, rank
from bertkit.text.sources import TextSource
from bertkit.training.recipe import PretrainRecipe

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights

RECIPE_DEFAULTS = PretrainRecipe()


def pretrain_command(
    recipe: str,
    *,
    out: Path,
    store: Path | None = None,
    corpus: Annotated[TextFlags, FLATTEN] = NO_TEXT,
    init_from: Path | None = None,
    workers: int | None = None,
    device: Device = "auto",
    compile: bool = False,  # noqa: A002 - the flag's natural name
    timeout: float = 600.0,
    track: tuple[str, ...] = ("tensorboard",),
    settings: Annotated[PretrainRecipe, FLATTEN] = RECIPE_DEFAULTS,
) -> int:
    """Pre-train a BERT from text or a token store.

    Run the same command again to resume a stopped run. Ctrl-C saves a checkpoint and stops. With
    several GPUs or machines: torchrun --nproc-per-node 8 -m bertkit pretrain ...

    Parameters
    ----------
    recipe
        A shipped recipe (such as base, large, small, two-cores, no-nsp, albert-base; a wrong name
        lists all) or a .toml file. The dotted flags below override its fields; the defaults shown
        are for fields that it leaves out.
    out
        The run directory.
    store
        A token store made by `bertkit prepare`.
    init_from
        A model to take the weights and sizes from: a directory, or a name on the Hugging Face hub.
        --text is tokenized with its tokenizer, and a --store must have been made with it.
    workers
        The number of loader processes: by default 0 on a CPU, and up to 4 on a GPU.
    compile
        Compile layers, head and losses (CUDA only); the first update waits for the compiler.
    timeout
        With several processes: the seconds to wait for another process before giving up.
    track
        Trackers that receive the journal's records: tensorboard (if it is installed), wandb,
        mlflow.
    """
    from bertkit.training.device import choose_device, choose_precision
    from bertkit.training.journal import check_trackers
    from bertkit.training.pretrain import pretrain
    from bertkit.training.step import check_compiler

    check_corpus_flags(store, corpus)
    on = choose_device(device)  # what cannot work is refused before hours of preparation
    choose_precision(settings.training.precision, on)
    check_trackers(track)
    if compile:
        check_compiler(on)
    out = check_output(out, corpus.text, folder=True)
    start = None
    if init_from is not None:
        start, corpus = read_start(init_from, recipe, settings, corpus)
    with Console() as console:
        max_length, positions = max(settings.phases.lengths), settings.model.max_position_embeddings
        if max_length < positions and start is None:
            console.say(
                f"examples have at most {max_length} tokens, so the last "
                f"{positions - max_length} of the model's {positions} positions are never trained "
                "(--model.max-position-embeddings)"
            )
        opened = TokenStore(store) if store else corpus_store(corpus, out, console)
        stopped_by = pretrain(
            settings,
            opened,
            out,
            recipe_name=Path(recipe).stem,
            init_from=start,
            workers=workers,
            device=device,
            compiled=compile,
            timeout=timeout,
            console=console,
            track=track,
        )
        if stopped_by is None and not rank():
            describe_run(out, console)
    return 0 if stopped_by is None else 128 + stopped_by


def describe_run(out: Path, console: Console) -> None:
    """Say what is wrong with a finished run, and write its report."""
    from bertkit.report.findings import run_findings
    from bertkit.report.pretraining import write_report
    from bertkit.training.journal import JOURNAL, read_journal

    console.say(*run_findings(out, read_journal(out / JOURNAL)), f"report: {write_report(out)}")


def read_start(
    init_from: Path, recipe: str, settings: PretrainRecipe, corpus: TextFlags
) -> tuple[PretrainedWeights, TextFlags]:
    """Read and check the model of --init-from; return it, and the corpus with its tokenizer."""
    from bertkit.checkpoints.pretrained import read_pretrained, tokenizer_folder
    from bertkit.tokenizer.wordpiece import Tokenizer
    from bertkit.training.pretrain import check_initial_model

    sizes = vars(read_recipe(PretrainRecipe, recipe).model)
    for name, value in vars(settings.model).items():
        if value != sizes[name] and name not in ("dropout", "max_position_embeddings"):
            raise BertkitError(
                f"{flag(f'model.{name}')} has no effect with --init-from, since the sizes "
                "are those of the model; leave it out"
            )
    if corpus.text and corpus.tokenizer is None:
        corpus = replace(corpus, tokenizer=tokenizer_folder(init_from))
    start = read_pretrained(init_from)
    tokenizer = start.tokenizer if corpus.tokenizer is None else Tokenizer.load(corpus.tokenizer)
    check_initial_model(start, settings, tokenizer)
    return start, corpus


def check_corpus_flags(store: Path | None, corpus: TextFlags) -> None:
    """Check that the flags name one corpus, and that none of them would have no effect."""
    if corpus.text and not is_alone():
        raise BertkitError(
            "several processes cannot start from --text; make a store with `bertkit prepare` once "
            "and give --store"
        )
    if (store is not None) == bool(corpus.text):
        raise BertkitError("say where the text is: either --store STORE or --text PATHS")
    if store is not None and corpus != NO_TEXT:
        flags = [flag(n) for n, v in vars(corpus).items() if v != vars(NO_TEXT)[n]]
        raise BertkitError(f"--store holds tokenized text already; leave out {', '.join(flags)}")


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
