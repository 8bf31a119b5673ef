"""The options of data with images: where a row's image is, and the network that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from bertkit.datasets.readers import Columns, Reading
from bertkit.datasets.records import Records
from bertkit.datasets.tabular import Fields
from bertkit.errors import BertkitError, flag

IMAGE_OPTIONS = (
    *("image_column", "image_size", "patch_size", "image_boxes", "image_network", "co_layers"),
    "image_task",
)
"""Options of columns that are recorded only for inputs with images."""
LABELS_GIVEN = "labels"
"""The value of `image_task` for data with labels."""
ALIGNED = "aligned"
"""The label of an image with its own text."""


@dataclass(frozen=True, kw_only=True)
class ImageColumns(Columns):
    """Columns that may have an image in each row."""

    has_image_tasks: ClassVar[bool] = False
    """Whether `image_task` may be other than labels."""
    image_column: str = ""
    """The column of an image that is read with the text: the path of a PNG or JPEG, relative to the
    data file; the image's features as a list of vectors; or its key in `image_features`."""
    image_features: str = ""
    """A file of image features: .npy (by row number), .safetensors, or .parquet."""
    image_size: int = 224
    """The side, in pixels, to which pictures are scaled."""
    patch_size: int = 16
    """The side, in pixels, of the patches into which pictures are cut."""
    image_boxes: bool = False
    """Whether the last four numbers of every vector are the box of its region: left, top, right
    and bottom, as fractions of the image's width and height."""
    image_network: str = ""
    """mmbt (images are tokens of BERT), vilbert (a stream of their own beside BERT), or "" for the
    network of the model to initialise from, else mmbt."""
    co_layers: tuple[int, ...] = ()
    """For vilbert: the text's layers, from 0, before which text and image attend to each other; by
    default the upper half."""
    image_task: str = LABELS_GIVEN
    """labels (of the column `label`); or, for vilbert, whether text and image belong together:
    alignment, or pretraining, which predicts masked tokens and regions too."""

    def __post_init__(self) -> None:
        """Check the options of images.

        Raises:
            BertkitError: patches do not tile pictures (code "image-size"), or there is no such
                network or task (codes "image-network" and "image-task"); see also `Columns`.
        """
        super().__post_init__()
        if not self.image_column:
            return
        from bertkit.multimodal.images import PatchGrid, check_network

        PatchGrid(self.image_size, self.patch_size).check()
        check_network(self.image_network, self.co_layers, self.image_task)
        if self.image_task != LABELS_GIVEN and not self.has_image_tasks:
            raise BertkitError(
                f"--image-task {self.image_task} is for classification; leave it out",
                code="image-task",
            )

    def image_reader(self, reading: Reading) -> Callable[[Fields, str], Any]:
        """Return the function that reads the image of a row.

        It returns None if rows have no images, or (and counts it) if the field is empty.

        Raises:
            BertkitError: an option has no effect without `image_column` (code "image-column"), or
                the file of features cannot be read.
        """
        if not self.image_column:
            for name in ("image_features", *IMAGE_OPTIONS):
                if getattr(self, name) != getattr(ImageColumns, name):
                    raise BertkitError(
                        f"{flag(name)} needs the column of the images; give --image-column",
                        code="image-column",
                    )
            return lambda row, place: None
        from bertkit.multimodal.images import PatchGrid, open_features, read_image

        grid, column = PatchGrid(self.image_size, self.patch_size), self.image_column
        features = open_features(self.image_features, column) if self.image_features else None
        in_file = not isinstance(reading.path, Records)
        known: WeakValueDictionary[Any, Any] = WeakValueDictionary()  # several texts share an image

        def image(row: Fields, place: str) -> Any:
            value = row[column]
            if value is None or (isinstance(value, str) and not value.strip()):
                reading.counts.note(f"empty '{column}'", place)
                return None
            folder = Path(place.rpartition(":")[0]).parent if in_file else None
            if isinstance(value, Mapping) and not in_file:
                value = data_set_picture(value)
            name = (folder, value) if isinstance(value, str | int | float) else None
            found = known.get(name)
            if found is None:
                found = read_image(value, place, grid, features=features, folder=folder)
                if name:
                    known[name] = found
            return found

        return image


def data_set_picture(value: Mapping[str, Any]) -> Any:
    """Decode a picture of a `datasets.Dataset`, which may have any format; others are returned."""
    with suppress(Exception):  # whoever reads what is returned says what is wrong with it
        from datasets import Image

        return Image().decode_example(dict(value))
    return value
