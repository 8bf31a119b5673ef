"""Images as vectors: features from a file or from lists of numbers, and pictures cut into patches.

An image is an array (vectors, width): float32 for features, such as those of regions or of the
cells of a grid, and uint8 for the patches of a picture. The network (`model.py`) projects vectors
to the width of its token embeddings, so that each stands for one token.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertkit.errors import BertkitError, nearest, short_repr
from bertkit.files import from_home
from bertkit.text.documents import optional_library
from bertkit.text.lines import value_name

MOST_PIXELS = 50_000_000
"""The most pixels of a picture: a small file may hold far more, and decoding takes memory."""
LARGEST_SIDE = 4096
"""The largest side, in pixels, to which pictures may be scaled."""
LARGEST_PATCH = 512
"""The largest side of a patch: the projection has a weight for each of its values."""
PICTURE_FORMATS = ("PNG", "JPEG")
CHANNELS = 3

NETWORKS = ("mmbt", "vilbert")
IMAGE_TASK_NAMES = ("labels", "alignment", "pretraining")


def check_network(network: str, co_layers: tuple[int, ...], task: str) -> None:
    """Check the options of `TextColumns` about the network that reads images, and its task.

    Raises:
        BertkitError: there is no such network (code "image-network") or task (code "image-task").
    """
    if network not in ("", *NETWORKS):
        raise BertkitError(
            f"no network for images is called '{network}'{nearest(network, NETWORKS)}",
            code="image-network",
        )
    if network == "mmbt" and co_layers:
        raise BertkitError(
            "--co-layers is an option of --image-network vilbert; leave it out",
            code="image-network",
        )
    if task not in IMAGE_TASK_NAMES or (network == "mmbt" and task != "labels"):
        hint = nearest(task, IMAGE_TASK_NAMES)
        raise BertkitError(
            f"no task of images is called '{task}'{hint}"
            if task not in IMAGE_TASK_NAMES
            else f"--image-task {task} needs --image-network vilbert",
            code="image-task",
        )


class PatchGrid(NamedTuple):
    """How pictures become vectors: the sides, in pixels, of the scaled picture and of a patch."""

    image_size: int
    patch_size: int

    @property
    def side(self) -> int:
        """The number of patches in a row, and of rows."""
        return self.image_size // self.patch_size

    @property
    def width(self) -> int:
        """The number of values in a patch."""
        return CHANNELS * self.patch_size**2

    def check(self) -> None:
        """Check that patches tile the picture.

        Raises:
            BertkitError: they do not, or a size is out of range (code "image-size").
        """
        whole, part = self
        if not 1 <= part <= min(whole, LARGEST_PATCH) or whole > LARGEST_SIDE or whole % part:
            raise BertkitError(
                f"pictures of {whole} pixels cannot be cut into patches of {part}: --image-size "
                f"must be a multiple of --patch-size; at most {LARGEST_SIDE:,} and "
                f"{LARGEST_PATCH} are accepted",
                code="image-size",
            )


def read_image(
    value: Any,
    place: str,
    grid: PatchGrid | None,
    *,
    features: FeatureFile | None = None,
    folder: Path | None = None,
) -> np.ndarray:
    """Return the vectors of the image that a field, an argument or a request holds.

    Args:
        value: a key of `features`, if they are given; else features as an array or lists (of one
            vector, or of several), also as JSON; or a picture as a path, the bytes of a PNG or
            JPEG, a picture of Pillow, or an array of uint8 (height, width) or (height, width, 3).
        place: the location of the input, for messages.
        grid: how a picture is cut; None for a model that reads features only.
        features: the features by key.
        folder: the folder to which paths are relative; None for the working directory.

    Raises:
        BertkitError: there is no such image, or it cannot be used; the code is "image-missing",
            "image-file", "image-shape", "image-nan" or "image-kind".
    """
    if features is not None:
        return features.vectors(value, place)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # a path may begin with a bracket
            value = json.loads(value)
    if isinstance(value, Mapping):  # of a Hugging Face data set in Parquet
        value = value.get("bytes") or value.get("path") or value
    if isinstance(value, bytearray | memoryview):  # as drivers of databases give pictures
        value = bytes(value)
    pixels = isinstance(value, np.ndarray) and value.dtype == np.uint8
    if not pixels and not isinstance(value, str | Path | bytes) and not is_pillow(value):
        return as_vectors(value, place)
    if grid is None:
        raise BertkitError(
            f"{place}: the model reads the features of images, and here is {short_repr(value)}; "
            "give a list of vectors, or name the file of the features (--image-features)",
            code="image-kind",
        )
    if isinstance(value, str | Path):
        value = Path(folder or ".", from_home(value))
    return cut_into_patches(read_picture(value, place, grid.image_size), grid.patch_size)


def as_vectors(value: Any, place: str) -> np.ndarray:
    """Return features as float32 (vectors, width); a single vector becomes one row.

    Raises:
        BertkitError: the value is no such array (code "image-shape"), or a number is NaN or
            infinite (code "image-nan").
    """
    try:
        with np.errstate(over="ignore"):
            found = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # unequal lists, texts, gradients
        found = np.empty(0, dtype=np.float32)
    if found.ndim not in (1, 2) or not found.size:  # a single number may be a key
        raise BertkitError(
            f"{place}: the image is {short_repr(value)}, neither a vector of numbers nor a list of "
            "vectors of one width; correct it (if it is a key, give --image-features)",
            code="image-shape",
        )
    if not np.isfinite(found).all():
        raise BertkitError(
            f"{place}: a feature of the image is NaN or infinite; compute the features again or "
            "leave the row out",
            code="image-nan",
        )
    return np.atleast_2d(found)


# Feature files -----------------------------------------------------------------------------------


class FeatureFile:
    """The features of many images, by key or by the number of their row from 0.

    Args:
        path: the file, for messages.
        get: returns the features of a key of `keys`, or of a row number.
        rows: the number of rows.
        keys: the names of the images; None if they are numbered.
    """

    def __init__(
        self, path: Path, get: Callable[[Any], Any], rows: int, keys: Mapping[str, Any] | None
    ) -> None:
        self.path, self.get, self.rows, self.keys = path, get, rows, keys

    def vectors(self, key: Any, place: str) -> np.ndarray:
        """Return the features of one image as float32 (vectors, width).

        Raises:
            BertkitError: there is no such image (code "image-missing"); see also `as_vectors`.
        """
        name, found = value_name(key), None
        if self.keys is not None:
            found = self.keys.get(name)
        elif name.isdecimal() and len(name) < 19 and int(name) < self.rows:
            found = int(name)
        if found is None:
            known = "keys" if self.keys is not None else "row numbers from 0"
            raise BertkitError(
                f"{place}: {self.path} has no features of {short_repr(key)} (it has "
                f"{self.rows:,} images by {known}); correct the row or leave it out",
                code="image-missing",
            )
        return as_vectors(self.get(found), place)


def open_features(path: str | Path, column: str) -> FeatureFile:
    """Open a file of features, whose format is that of its ending.

    A `.npy` file holds (rows, vectors, width) or (rows, width), and is not read into memory at
    once. A `.safetensors` file holds one tensor for each image, called by its key, or one tensor
    (rows, vectors, width). A `.parquet` file holds one column of lists and, optionally, the keys,
    in a column with the name of the data's `column` that names images.

    Raises:
        BertkitError: the file is missing, damaged or of another form (code "image-features").
    """
    path = Path(from_home(path))
    readers = {".npy": npy_features, ".safetensors": tensor_features, ".parquet": parquet_features}
    if path.suffix.lower() not in readers:
        raise feature_error(path, f"must end in {', '.join(readers)}")
    try:
        found = path.stat()
    except OSError as error:
        raise feature_error(path, f"cannot be read ({error.strerror})") from error
    return opened(path, column, (found.st_mtime_ns, found.st_size), readers[path.suffix.lower()])


@lru_cache(maxsize=1)
def opened(
    path: Path, column: str, state: tuple[int, int], read: Callable[[Path, str], FeatureFile]
) -> FeatureFile:
    """Read a file once for all splits; `state` changes if the file is written to."""
    return read(path, column)


def feature_error(path: Path, problem: str) -> BertkitError:
    """Return the error for a file of features that cannot be used."""
    return BertkitError(
        f"the image features {path}: the file {problem}; write .npy, .safetensors or .parquet as "
        "the page on images says",
        code="image-features",
    )


def npy_features(path: Path, column: str) -> FeatureFile:
    """See `open_features`."""
    try:
        with np.errstate(over="raise"):
            rows = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, ArithmeticError, EOFError) as error:
        raise feature_error(path, f"is not a .npy file of numbers, or damaged ({error})") from error
    if rows.ndim not in (2, 3) or rows.dtype.kind not in "fiu":
        raise feature_error(path, "does not hold an array of numbers, (rows, vectors, width)")
    return FeatureFile(path, rows.__getitem__, len(rows), None)


def tensor_features(path: Path, column: str) -> FeatureFile:
    """See `open_features`."""
    from bertkit.checkpoints.weights import is_floating_point, read_tensors

    try:
        tensors = read_tensors(path)
    except BertkitError as error:
        raise feature_error(path, f"is damaged ({error})") from error
    if not tensors or not all(map(is_floating_point, tensors.values())):
        raise feature_error(path, "holds no tensors, or some that are not floating-point")
    rows = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    [first, *others] = rows.values()
    if first.ndim == 3 and not others:
        return FeatureFile(path, first.__getitem__, len(first), None)
    return FeatureFile(path, rows.__getitem__, len(rows), {name: name for name in rows})


def parquet_features(path: Path, column: str) -> FeatureFile:
    """See `open_features`."""
    arrow = optional_library("pyarrow", "Parquet files")
    parquet = optional_library("pyarrow.parquet", "Parquet files")
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise feature_error(path, f"is not Parquet, or damaged ({error})") from error
    lists = [field.name for field in table.schema if "list" in str(field.type).partition("<")[0]]
    if len(lists) != 1:
        raise feature_error(path, f"has {len(lists)} columns of lists instead of one")
    rows, keys = table.column(lists[0]), None
    if column in table.column_names and column != lists[0]:
        keys = {value_name(key): row for row, key in enumerate(table.column(column).to_pylist())}
        if len(keys) < len(rows):
            raise feature_error(path, f"has a value in '{column}' twice")
    for name in table.column_names if keys is None else ():
        if name != lists[0] and len(set(map(str, table.column(name).to_pylist()))) == len(rows):
            raise feature_error(
                path,
                f"has no column '{column}', but '{name}', which could hold the keys; give it the "
                f"name '{column}', or remove it to read images by row number",
            )
    return FeatureFile(path, lambda row: rows[row].as_py(), len(rows), keys)


# Pictures ----------------------------------------------------------------------------------------


def is_pillow(value: object) -> bool:
    """Return whether a value is a picture of Pillow, without importing it."""
    return hasattr(value, "convert") and hasattr(value, "getexif")


def read_picture(source: Any, place: str, size: int) -> np.ndarray:
    """Return a picture scaled to (size, size, 3) uint8.

    Args:
        source: the path or the bytes of a PNG or JPEG, its pixels as uint8, or a picture of Pillow.
        place: the location of the input, for messages.
        size: the side in pixels; the picture's proportions are not kept.

    Raises:
        BertkitError: the file is missing, damaged, of another format or too large (code
            "image-file").
    """
    image = optional_library("PIL.Image", "pictures", "images")
    turn = optional_library("PIL.ImageOps", "pictures", "images").exif_transpose
    name = str(source) if isinstance(source, Path) else "the picture"
    try:
        with opened_picture(source) as picture:
            if not 0 < picture.width * picture.height <= MOST_PIXELS:
                raise ValueError(f"it has no pixels, or more than {MOST_PIXELS:,}")
            if picture.mode.startswith(("I", "F")):  # conversion would clip its values at 255
                raise ValueError("it has more than 8 bits per channel")
            turn(picture, in_place=True)  # without a copy, which could have 200 MB
            colours = picture if picture.mode == "RGB" else picture.convert("RGB")
            scaled = colours.resize((size, size), image.Resampling.BILINEAR)
    except Exception as error:  # Pillow raises many types for damaged files
        if isinstance(error, MemoryError):
            raise
        reason = str(getattr(error, "strerror", None) or error)
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else reason
        reason = "it is neither PNG nor JPEG" if "cannot identify" in reason else reason
        keys = "; if the column holds keys of features, give --image-features"
        raise BertkitError(
            f"{place}: {name} cannot be read ({reason}); correct the row or leave it out"
            f"{keys if isinstance(source, Path) else ''}",
            code="image-file",
        ) from error
    return np.asarray(scaled)


@contextmanager
def opened_picture(source: Any) -> Iterator[Any]:
    """Yield a picture of Pillow without its warnings; of a file only the head has been read."""
    image = optional_library("PIL.Image", "pictures", "images")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(source, np.ndarray):
            picture = image.fromarray(source)
        elif is_pillow(source):
            picture = source.copy()  # the caller's stays as it is
        else:
            if isinstance(source, Path) and source.exists() and not source.is_file():
                raise ValueError("it is a folder, a pipe or a device")  # it may never end
            file = BytesIO(source) if isinstance(source, bytes) else source
            picture = image.open(file, formats=PICTURE_FORMATS)
        with picture:
            yield picture


def count_pixels(source: bytes) -> int:
    """Return the number of pixels that the head of a picture declares; 0 if it has none."""
    with suppress(Exception), opened_picture(source) as picture:
        return int(picture.width * picture.height)
    return 0


def cut_into_patches(pixels: np.ndarray, patch: int) -> np.ndarray:
    """Return the patches of a picture from left to right and top to bottom, as flat rows.

    Args:
        pixels: (size, size, channels).
        patch: the side of a patch in pixels, which divides the size.

    Returns:
        (patches, patch * patch * channels), as in ViT (Dosovitskiy et al. 2021, section 3.1).
    """
    side, channels = len(pixels) // patch, pixels.shape[2]
    split = pixels.reshape(side, patch, side, patch, channels).swapaxes(1, 2)
    return np.ascontiguousarray(split.reshape(side * side, patch * patch * channels))
