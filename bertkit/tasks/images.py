"""Tasks on an image with a text (MMBT, Kiela et al. 2019): classification and regression.

The input is [CLS] image [SEP] text [SEP], where every vector of the image takes the place of one
token. If a text has several windows, each of them contains the whole image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from bertkit.datasets.examples import TextExample
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.multimodal.images import CHANNELS, PatchGrid, read_image
from bertkit.multimodal.model import ImageTextModel
from bertkit.tasks.classification import Classification, MultiLabelClassification, TextTask
from bertkit.tasks.regression import Regression
from bertkit.tasks.task import Encoded, Task, TaskInputs
from bertkit.tasks.windows import cut_into_windows, surround
from bertkit.tokenizer.wordpiece import Tokenizer

MOST_VALUES = 1 << 20
"""The largest width of a vector; a damaged `bertkit.json` could demand any memory."""


@dataclass(frozen=True)
class ImageTask(TextTask):
    """A task on an image with a text: what the three task types have in common."""

    image_width: int = 0
    """The width of an image's vectors."""
    image_size: int = 0
    """The side in pixels to which pictures are scaled; 0 for features."""
    patch_size: int = 0
    """The side in pixels of a picture's patches; 0 for features."""
    reads_images = True

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            BertkitError: a size is impossible (code "image-size").
        """
        if self.grid is not None:
            self.grid.check()
        wanted = self.grid.width if self.grid else min(max(1, self.image_width), MOST_VALUES)
        if self.image_width not in (0, wanted):
            raise BertkitError(
                f"an image's vectors cannot have {self.image_width:,} values (the most are "
                f"{MOST_VALUES:,}); give shorter vectors, or restore the model",
                code="image-size",
            )

    @property
    def grid(self) -> PatchGrid | None:
        """How pictures are cut into patches; None for features."""
        return PatchGrid(self.image_size, self.patch_size) if self.image_size else None

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`; the first training image determines what images are."""
        image, columns = data.train[0].image, data.columns
        pictures = image.dtype == np.uint8
        sizes = (columns.image_size, columns.patch_size) if pictures else (0, 0)
        made = super().from_data(data)
        return replace(made, image_width=image.shape[1], image_size=sizes[0], patch_size=sizes[1])

    def build(self, config: ModelConfig) -> ImageTextModel:
        """See `Task`; without a width, as in a damaged `bertkit.json`, no weights fit."""
        width = max(1, self.image_width)
        return ImageTextModel(config, len(self.labels) or 1, width, self.grid)

    def read_image(self, value: Any, place: str) -> np.ndarray:
        """Return the vectors of an image that is given in memory; see `images.read_image`."""
        return read_image(value, place, self.grid)

    def blank_image(self) -> np.ndarray:
        """Return an image that the model can read: zero features, or a black picture."""
        pixels = np.zeros((1, 1, CHANNELS), np.uint8)
        return pixels if self.grid else np.zeros((1, self.image_width), np.float32)

    def encode_windows(
        self,
        given: TextExample,
        text: list[int],
        pair: list[int] | None,
        tokenizer: Tokenizer,
    ) -> list[Encoded]:
        """See `TextTask`; every window contains the whole image."""
        image = self.checked_image(given)
        room = self.max_length - len(image) - 3
        if room < 2:
            raise BertkitError(
                f"{given.place}: an image of {len(image)} vectors leaves no room for text in "
                f"{self.max_length} tokens; give fewer vectors, a larger --patch-size, or a larger "
                "--max-length",
                code="image-length",
            )
        placeholders = [tokenizer.pad_id] * len(image)
        return [
            surround(placeholders, window, tokenizer)
            for window in cut_into_windows(text, room, self.stride)
        ]

    def checked_image(self, given: TextExample) -> np.ndarray:
        """Return the image of an input, after checking that it is one that the model reads.

        Raises:
            BertkitError: there is none (code "image-missing"), it has another form (code
                "image-kind" or "image-shape"), or there are two texts (code "image-pair").
        """
        image, grid = given.image, self.grid
        if given.pair is not None:
            raise BertkitError(
                f"{given.place}: the model reads an image and one text; leave the second text out",
                code="image-pair",
            )
        if image is None:
            raise BertkitError(
                f"{given.place}: the model reads an image with every text, and here is only text; "
                "give both (in a file --image-column names the image)",
                code="image-missing",
            )
        if (image.dtype == np.uint8) != (grid is not None):
            wanted = "features, not pictures" if grid is None else "pictures, not features"
            raise BertkitError(f"{given.place}: the model reads {wanted}", code="image-kind")
        vectors = len(image) if grid is None else grid.side**2
        if image.shape != (vectors, self.image_width):
            shape = f"{len(image)} vectors of {image.shape[1]} values"
            raise BertkitError(
                f"{given.place}: the image has {shape}, and the model reads vectors of "
                f"{self.image_width}{f', {vectors} of them' if grid else ''}; make all images in "
                "the same way",
                code="image-shape",
            )
        return image


@dataclass(frozen=True)
class ImageClassification(ImageTask, Classification):
    """A task with one label for each image with a text."""


@dataclass(frozen=True)
class ImageMultiLabelClassification(ImageTask, MultiLabelClassification):
    """A task with any number of labels for each image with a text."""


@dataclass(frozen=True)
class ImageRegression(ImageTask, Regression):
    """A task with one number for each image with a text."""


IMAGE_TASKS: Mapping[str, type[Task]] = {
    task.task_type: task
    for task in (ImageClassification, ImageMultiLabelClassification, ImageRegression)
}
"""Task type -> the task on images with texts."""
