"""From text to a token store in one step: learn a vocabulary, unless one is given, and prepare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bertkit.config import as_json
from bertkit.console import Console, console_or_new
from bertkit.corpus.build import PrepareOptions, check_inputs, prepare, text_changed
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import claim, exclusive_lock, from_home
from bertkit.processes import worker_count
from bertkit.tokenizer.learn import LearnOptions, learn_from_files
from bertkit.tokenizer.wordpiece import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options of a run that starts from text instead of a store."""

    text: tuple[str, ...] = ()
    """Text to train on: files, folders, globs, URLs, hf:NAME (instead of --store)."""
    tokenizer: Path | None = None
    """An existing tokenizer for --text; by default that of --init-from, or else a vocabulary is
    learned."""
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


def store_from_text(
    corpus: TextOptions, out: Path | str, *, console: Console | None = None
) -> TokenStore:
    """Learn a vocabulary and prepare a store inside a run directory, unless already done.

    Args:
        corpus: the text, and how it is read and tokenized.
        out: the run directory, as for `bertkit.pretrain`. It gets the folders `tokenizer` and
            `store`, and is locked meanwhile.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: the directory was started with other text or options, they are invalid, or
            another process is using it.
    """
    out = Path(from_home(out))
    with exclusive_lock(out), console_or_new(console) as shown:
        return _store_from_text(corpus, out, shown)


def _store_from_text(corpus: TextOptions, out: Path, console: Console) -> TokenStore:
    worker_count(corpus.processes)  # refuses a negative number before anything is written
    if corpus.tokenizer is not None and (corpus.vocabulary_size, corpus.cased) != (
        NO_TEXT.vocabulary_size,
        NO_TEXT.cased,
    ):
        raise BertkitError(
            "--vocabulary-size and --cased are for a vocabulary that is learned; remove them, or "
            "remove --tokenizer and --init-from"
        )
    options = PrepareOptions(format=corpus.format, column=corpus.column, language=corpus.language)
    learned, folder = out / "tokenizer", out / "store"
    complete = (folder / "manifest.json").is_file()
    begun = complete or (folder / "parts").is_dir()
    if not complete:
        check_inputs(corpus.text, folder, options)  # before these flags are written down
    flags = {k: v for k, v in as_json(corpus).items() if k != "processes"}
    flags["learned"] = corpus.tokenizer is None
    if not (learned.exists() or folder.exists()):
        (out / "corpus.json").unlink(missing_ok=True)  # left by flags that failed
    # a tokenizer is compared by its content, as the folder of a model on the hub may change
    claim(out, "corpus", flags, may_change=("tokenizer",))
    if corpus.tokenizer is not None:
        tokenizer = Tokenizer.load(corpus.tokenizer)
    elif begun and (learned / "tokenizer_config.json").is_file():
        tokenizer = Tokenizer.load(learned)
    else:  # the vocabulary of a run that was stopped before may be of another text
        learning = LearnOptions(
            cased=corpus.cased,
            format=corpus.format,
            column=corpus.column,
            processes=corpus.processes,
        )
        tokenizer, _ = learn_from_files(corpus.text, corpus.vocabulary_size, learning, console)
        tokenizer.save(learned)
    if complete:
        store = TokenStore(folder)
        store.check_tokenizer(tokenizer, str(corpus.tokenizer or learned))
        if text_changed(corpus.text, folder, options):
            console.say(
                f"the text is not as it was when {folder} was made from it, and the store "
                "is used as it is; to train on the text of today, choose another --out"
            )
        return store
    return prepare(
        *(list(corpus.text), tokenizer, folder, options),
        processes=corpus.processes,
        console=console,
    )
