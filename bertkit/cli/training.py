"""Commands of pre-training: demo, pretrain and report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bertkit.cli.options import FLATTEN, NO_TEXT, Device, TextFlags
from bertkit.corpus.prepare import store_from_text
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, flag
from bertkit.files import check_output
from bertkit.processes import is_alone, rank
from bertkit.progress import Console
from bertkit.text.sources import TextSource
from bertkit.training.recipe import PretrainRecipe, read_recipe

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights

RECIPE_DEFAULTS = PretrainRecipe()


def demo_command(*, out: Path = Path("runs/demo")) -> int:
    """Pre-train and fine-tune a small BERT on the docstrings of Python and of installed packages.

    Nothing is downloaded. It takes a few minutes on two cores.

    Args:
        out: The run directory; the report is its report.html.
    """
    import torch

    from bertkit.demo import run_demo

    out = check_output(out, folder=True)
    torch.set_num_threads(1)  # the network is so small that threads mostly wait for each other
    with Console() as console:
        stopped = run_demo(out, console)
    return 0 if stopped is None else 128 + stopped


def report_command(run: Path) -> None:
    """Write a run's report as one self-contained HTML page with plots.

    Args:
        run: The folder of a pre-training run or a fine-tuning, finished or still running.
    """
    from bertkit.report.pretraining import write_report

    print(f"report: {write_report(run)}")


def pretrain_command(
    recipe: str,
    *,
    out: Path,
    store: Path | None = None,
    corpus: Annotated[TextFlags, FLATTEN] = NO_TEXT,
    init_from: str | None = None,
    minutes: float | None = None,
    workers: int | None = None,
    device: Device = "auto",
    compile: bool = False,  # noqa: A002 - the flag's natural name
    timeout: float = 600.0,
    settings: Annotated[PretrainRecipe, FLATTEN] = RECIPE_DEFAULTS,
) -> int:
    """Pre-train a BERT from text or a token store.

    Run the same command again to resume a stopped run. Ctrl-C saves a checkpoint and stops. With
    several GPUs or machines: torchrun --nproc-per-node 8 -m bertkit pretrain ...

    Args:
        recipe: A shipped recipe (such as base, large, small, two-cores, no-nsp, albert-base; a
            wrong name lists all) or a .toml file. The dotted flags below override its fields; the
            defaults shown are for fields that it leaves out.
        out: The run directory.
        store: A token store made by `bertkit prepare`.
        init_from: A model to take the weights and sizes from: a directory, or a name on the Hugging
            Face hub. --text is tokenized with its tokenizer, and a --store must have been made with
            it.
        minutes: About how long to train: the speed is measured for some seconds, and the updates of
            the phases and the warm-up are scaled in proportion. A resumed run keeps its updates.
        workers: The number of loader processes: by default 0 on a CPU, and up to 4 on a GPU.
        compile: Compile layers, head and losses (CUDA only); the first update waits for the
            compiler.
        timeout: With several processes: the seconds to wait for another process before giving up.
    """
    from bertkit.training.device import choose_device, choose_precision
    from bertkit.training.pretrain import pretrain
    from bertkit.training.step import check_compiler

    check_corpus_flags(store, corpus)
    on = choose_device(device)  # what cannot work is refused before hours of preparation
    choose_precision(settings.training.precision, on)
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
            minutes=minutes,
            workers=workers,
            device=device,
            compiled=compile,
            timeout=timeout,
            console=console,
        )
        if stopped_by is None and not rank():
            describe_run(out, console)
    return 0 if stopped_by is None else 128 + stopped_by


def describe_run(out: Path, console: Console) -> None:
    """Say what is wrong with a finished run, and write its report."""
    from bertkit.progress import JOURNAL, read_journal
    from bertkit.report.findings import run_findings
    from bertkit.report.pretraining import write_report

    if not (out / JOURNAL).is_file():  # the model is whole without it
        console.say(f"{out / JOURNAL} is gone, so there is no report")
        return
    console.say(*run_findings(out, read_journal(out / JOURNAL)), f"report: {write_report(out)}")


def read_start(
    init_from: str, recipe: str, settings: PretrainRecipe, corpus: TextFlags
) -> tuple[PretrainedWeights, TextFlags]:
    """Read and check the model of --init-from; return it, and the corpus with its tokenizer."""
    from bertkit.checkpoints.pretrained import read_pretrained, tokenizer_folder
    from bertkit.tokenizer.wordpiece import Tokenizer
    from bertkit.training.start import check_initial_model

    sizes = vars(read_recipe(recipe).model)
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
    """Check that the flags name exactly one corpus, and that each of them has an effect."""
    if corpus.text and not is_alone():
        raise BertkitError(
            "several processes cannot start from --text; make a store with `bertkit prepare` once "
            "and give --store"
        )
    if (store is not None) == bool(corpus.text):
        raise BertkitError("say where the text is: either --store STORE or --text PATHS")
    if store is not None and corpus != NO_TEXT:
        raise BertkitError(
            "--store holds tokenized text already; leave out the flags of text: --tokenizer, "
            "--vocabulary-size, --cased, --keep-accents, --language, --format, --column, "
            "--processes"
        )


def corpus_store(corpus: TextFlags, out: Path, console: Console) -> TokenStore:
    """Learn a vocabulary from --text, unless a tokenizer is named, and prepare a store."""
    reading = corpus.reading
    return store_from_text(
        TextSource(corpus.text, reading.format, reading.column, corpus.language),
        out,
        tokenizer=corpus.tokenizer,
        vocabulary_size=corpus.vocabulary_size,
        cased=corpus.cased,
        keep_accents=corpus.keep_accents,
        processes=reading.processes,
        console=console,
    )
