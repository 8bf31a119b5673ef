"""What a command reads and what it writes, and the one rule about both: no output is an input.

The parameters of a command state with `Annotated` which files they name; the command line checks
all of them before it runs the command.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from cyclopts import ArgumentCollection
from cyclopts.argument import Argument

from bertkit.errors import BertkitError
from bertkit.files import from_home, is_descriptor

OWN_FILES = (
    *("config.json", "bertkit.json", "bert_config.json", "modules.json", "*_tokens*.json"),
    *("[0-9]*.json",),  # the parts of a store
    *("sentence_bert_config.json", "config_sentence_transformers.json", "model*.safetensors*"),
    *("generation_config.json", "pytorch_model*"),
    *("*.ckpt*", "vocab.txt", "tokenizer*.json", "vocabulary.json", "*.tokens.npy"),
    *("*.sentences.npy", "*.documents.npy", "unigrams.npy", "manifest.json"),
    *("remote.json", "recipe.json", "journal.jsonl", "corpus.json", "environment.json"),
    *("finetune.json", "grid.json", "settings.json", "results.json", "run.json", "demo.json"),
    *("progress.json", "optimizer*.safetensors", "report.html", "export.json"),
    "README.md",  # the model card
)
"""Patterns for the names of the files that make up runs, models, tokenizers and stores."""


@dataclass(frozen=True)
class Read:
    """A mark for a parameter that names an input."""

    kind: Literal["text", "own", "data", "named"] = "text"
    """text: files, globs, and folders whose every file is read; own: a run, model, tokenizer or
    store, in which only the files that bertkit knows are read; data: a folder in which only `files`
    are read; named: a single file, or a name that is not a path."""
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """A mark for a parameter that names an output."""

    kind: Literal["file", "folder", "results", "replaced"]
    """file: one file; folder: the files of a run, tokenizer or store are written into it; results:
    files of any name are written into it; replaced: the whole folder is replaced."""
    beside: str = ""
    """A suffix; the file of this name plus the suffix is written, too."""


TEXT, OWN, NAMED = Read("text"), Read("own", OWN_FILES), Read("named")
DATA = Read("data", ("*",))
FILE, FOLDER, RESULTS = Written("file"), Written("folder"), Written("results")
REPLACED, VECTORS = Written("replaced"), Written("file", beside=".json")


class Named(NamedTuple):
    """A path that was given on the command line, with the flag that it was given for."""

    flag: str
    path: Path
    mark: Read | Written

    def __str__(self) -> str:
        """Return the flag and the path, as error messages show them."""
        return f"{self.flag} {self.path}"


def check_output_files(arguments: ArgumentCollection) -> None:
    """Refuse a command line whose outputs would replace its inputs, or each other.

    An output that is a symbolic link is followed: the file that it points to is written.

    Raises:
        BertkitError: an output is also an input, would be written by two flags, is empty, or lies
            in a folder that cannot be written.
    """
    read: list[Named] = []
    written: list[Named] = []
    for argument in arguments:
        mark = path_mark(argument)
        if isinstance(mark, Written):
            follow_links(argument, mark)
            written += named(argument, mark)
        elif isinstance(mark, Read):
            read += named(argument, mark)
    for out in written:
        if out.mark.kind == "file" and out.path.is_dir():
            raise BertkitError(f"{out} is a folder; give the name of a file", code="folder")
        check_place(out)
        for given in read:
            if reason := overwrites(out, given):
                raise BertkitError(f"{reason}; choose another path", code="overwrites-input")
    for one, other in combinations(written, 2):
        for inner, outer in ((one, other), (other, one)):
            if inner.mark.kind == "file" and within(inner.path, outer.path) is not None:
                raise BertkitError(
                    f"{inner} collides with the output {outer}; choose another path",
                    code="overwrites-output",
                )


def check_place(out: Named) -> None:
    """Raise if an output cannot be created, which a long command would else notice at its end."""
    # os.path.exists raises no error below a folder that may not be entered, unlike Path.exists
    is_there, is_file = os.path.exists(out.path), os.path.isfile(out.path)  # noqa: PTH110, PTH113
    if is_descriptor(out.path) or (out.mark.kind == "file" and is_there and not is_file):
        raise BertkitError(f"{out} is a device or a pipe; give the name of a file", code="write")
    if out.mark.kind in ("folder", "results") and is_there and not out.path.is_dir():
        raise BertkitError(f"{out} is not a folder; give the name of a folder", code="write")
    above = (one for one in out.path.parents if os.path.exists(one))  # noqa: PTH110
    place = out.path if out.path.is_dir() else next(above, Path())
    if not place.is_dir():
        raise BertkitError(f"{out}: {place} is not a folder; choose another path", code="write")
    if not os.access(place, os.W_OK | os.X_OK):
        raise BertkitError(
            f"{out}: the folder {place} cannot be written; change its permissions or choose "
            "another path",
            code="write",
        )


def path_mark(argument: Argument) -> Read | Written | None:
    """Return the mark of a parameter; a parameter of type `Path` without one is an input."""
    for mark in getattr(argument.field_info.annotation, "__metadata__", ()):
        if isinstance(mark, Read | Written):
            return mark
    return OWN if Path in types_in(argument.hint) else None


def types_in(hint: Any) -> Iterator[Any]:
    """Yield a type and the types that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from types_in(part)


def named(argument: Argument, mark: Read | Written) -> Iterator[Named]:
    """Yield the paths that were given for a parameter, or else its default."""
    needed = argument.required or not argument.name.startswith("--")
    for token in argument.tokens:
        if not token.value and (needed or Path in types_in(argument.hint)):
            raise BertkitError(f"{argument.name} is empty; give a path", code="empty-path")
        if token.value and (path := local_path(token.value)):
            yield Named(argument.name, path, mark)
        elif token.value and isinstance(mark, Written):
            raise BertkitError(
                f"{argument.name} {token.value} is remote; write to a local or mounted folder, "
                "then copy",
                code="remote",
            )
    if not argument.tokens and isinstance(argument.field_info.default, Path):
        yield Named(argument.name, argument.field_info.default, mark)


def local_path(given: str) -> Path | None:
    """Return the local file of a path or an address (`zip://inside.txt::a.zip`), or None."""
    whole = given.rpartition("::")[2] if "://" in given else given
    whole = whole.removeprefix("file://").removeprefix("local://")
    return None if "://" in whole or given.startswith("hf:") else Path(whole)


def follow_links(argument: Argument, mark: Written) -> None:
    """Expand a leading ~ of an output, and replace a symbolic link by the target of the link."""
    argument.tokens[:] = [token.evolve(value=from_home(token.value)) for token in argument.tokens]
    for number, token in enumerate(argument.tokens):
        path = Path(token.value)
        if token.value and path.is_symlink() and not is_descriptor(path):
            target = os.path.realpath(token.value)
            if mark.kind == "file" and Path(target).suffixes != path.suffixes:
                raise BertkitError(
                    f"{argument.name} {token.value} is a link to {target}, whose name has another "
                    "ending; name that file",
                    code="link",
                )
            argument.tokens[number] = token.evolve(value=target)


def refuse_overwriting(
    out: Path, inputs: Iterable[str | os.PathLike[str]], mark: Written = FILE
) -> None:
    """Refuse an output of a function that would damage one of its inputs, which are texts.

    Raises:
        BertkitError: it would (code "overwrites-input").
    """
    for path in filter(None, (local_path(os.fspath(one)) for one in inputs)):
        if reason := overwrites(Named("out", out, mark), Named("the input", path, TEXT)):
            raise BertkitError(f"{reason}; choose another path", code="overwrites-input")


def overwrites(out: Named, given: Named) -> str:
    """Return why writing an output would damage an input, or "" if it would not."""
    assert isinstance(out.mark, Written)
    assert isinstance(given.mark, Read)
    places = [out.path]
    if out.mark.beside:
        places.append(out.path.parent / f"{out.path.name}{out.mark.beside}")
    for path in expanded(given):
        if any(same(place, path) for place in places):
            return f"{out} is also an input ({given.flag})"
        if out.mark.kind != "file" and holds(out, path, given.mark):
            return f"{given} lies in the folder of {out}, where it could be replaced"
        if path.is_dir():
            inside = f"{out} lies in {given}, "
            if given.mark.kind == "text" and within(out.path, path) is not None:
                return f"{inside}whose files are all read as text"
            if out.mark.kind == "file" and any(is_file_of(p, path, given.mark) for p in places):
                return f"{inside}and is one of its files"
    return ""


def expanded(given: Named) -> list[Path]:
    """Return the paths that an input names; for a TensorFlow checkpoint prefix, its folder."""
    path = Path(from_home(given.path))
    if given.mark.kind == "named":
        return [path] if path.is_file() else []
    if not os.path.lexists(path) and given.mark.kind == "text" and glob.has_magic(str(path)):
        return [Path(name) for name in glob.glob(str(path), recursive=True)]  # noqa: PTH207
    is_prefix = False
    if given.mark.kind == "own" and path.name:  # "." and "/" have none
        is_prefix = path.with_name(f"{path.name}.index").exists()
    return [path.parent if is_prefix else path]


def same(one: Path, other: Path) -> bool:
    """Return whether two paths name the same file or folder, which need not exist yet."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def within(path: Path, folder: Path) -> Path | None:
    """Return a path relative to a folder that contains or equals it, or None if it is elsewhere."""
    if "\0" in str(path):
        return None  # no file can have this name
    real, outer = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return real.relative_to(outer) if real.is_relative_to(outer) else None


def holds(out: Named, path: Path, mark: Read) -> bool:
    """Return whether an output folder contains an input that writing to it may replace."""
    inside = within(path, out.path)
    if inside is None:
        return False
    if out.mark.kind == "replaced":
        return True
    if mark.kind in {"own", "data"} or path.is_dir():  # no output file can have its name
        return False
    return out.mark.kind == "results" or matches(path, OWN_FILES)


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    """Return whether a file's name matches one of the patterns."""
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def is_file_of(out: Path, folder: Path, mark: Read) -> bool:
    """Return whether an output is one of the files read in a folder, by name or by hard link."""
    patterns = mark.files or ("*",)
    if within(out, folder) is not None and matches(out, patterns):
        return True
    if not out.is_file():
        return False
    found = out.stat()
    return any(
        matches(file, patterns) and os.path.samestat(found, file.stat())
        for file in files_below(folder)
        if file.is_file()
    )


def files_below(
    folder: Path | str, *, hidden: bool = True, onerror: Callable[[OSError], object] | None = None
) -> Iterator[Path]:
    """Yield every file below a folder, following links to other folders.

    Hidden files and folders are left out if `hidden` is false; for `onerror` see `os.walk`.
    """
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=onerror, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:  # a link may lead back to a parent
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if hidden or name[0] != ".")
        yield from (Path(parent, name) for name in names if hidden or name[0] != ".")
