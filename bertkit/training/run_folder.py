"""A run directory's claim: which recipe, corpus and machine it belongs to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from bertkit.config import differences
from bertkit.corpus.store import ARRAYS, TokenStore
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.training.devices import environment

IGNORED = {"store", "recipe_name"}
"""A store may move and a recipe may be renamed."""
LONGEST_DIFFERENCE = 120


def corpus_hash(store: TokenStore) -> str:
    """Names the content of a split by its shards' checksums."""
    sums = "".join(shard.sha256[kind] for shard in store.shards for kind in ARRAYS)
    return hashlib.sha256(sums.encode()).hexdigest()


def claim_settings(path: Path, settings: dict[str, Any], what: str) -> bool:
    """Write settings where there are none yet, or make sure that they are the same.

    Args:
        path: the JSON file.
        settings: plain JSON values.
        what: is named in the error, for example "a run".

    Returns:
        Whether the file was there.

    Raises:
        BertkitError: the file is damaged, or holds other settings.
    """
    if not path.is_file():
        write_json(path, settings)
        return False
    begun = read_json(path)
    if not isinstance(begun, dict):
        raise BertkitError(f"{path} is damaged; choose another --out")
    changed = differences(
        {key: value for key, value in begun.items() if key not in IGNORED},
        {key: value for key, value in settings.items() if key not in IGNORED},
    )
    if changed:
        named = "; ".join(text[:LONGEST_DIFFERENCE] for text in changed[:3])
        raise BertkitError(
            f"{path.parent} holds {what} with other settings ({named}); "
            "choose another --out, or restore the settings to go on"
        )
    return True


def claim_folder(folder: Path, recipe: dict[str, Any], name: str, store: TokenStore) -> list[str]:
    """Begin a run directory, or make sure that it holds this very run.

    Args:
        folder: the run directory.
        recipe: resolved, as JSON values.
        name: of the recipe.
        store: the corpus.

    Returns:
        What is different about this machine since the run was begun, in words.

    Raises:
        BertkitError: the folder holds a run of another recipe or corpus, or something else.
    """
    if (folder / "journal.jsonl").exists() and not (folder / "recipe.json").exists():
        raise BertkitError(f"{folder} has a journal but no recipe.json; choose another --out")
    now = environment()
    here = folder / "environment.json"
    if not here.is_file():
        write_json(here, now)
    settings = {
        "recipe": recipe,
        "recipe_name": name,
        "store": str(store.folder),
        "tokenizer_hash": store.tokenizer_hash,
        "corpus": corpus_hash(store),
    }
    if not claim_settings(folder / "recipe.json", settings, "a run"):
        return []
    before = read_json(here)
    ignored = {"command", "commit"}
    return differences(
        {key: value for key, value in before.items() if key not in ignored},
        {key: value for key, value in now.items() if key not in ignored},
    )
