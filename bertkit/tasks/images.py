"""Tasks on an image with a text: classification and regression.

The input of MMBT (Kiela et al. 2019) is [CLS] image [SEP] text [SEP], where every vector of the
image takes the place of one token; that of ViLBERT (Lu et al. 2019) is [CLS] text [SEP], and beside
it the regions of the image. If a text has several windows, each is read with the whole image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.datasets.examples import ChoiceExample, TextExample
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel
from bertkit.multimodal.images import CHANNELS, PatchGrid, check_network, read_image
from bertkit.multimodal.model import ImageTextModel
from bertkit.multimodal.regions import BOX, Regions, grid_boxes
from bertkit.multimodal.vilbert import TwoStreamModel, upper_half
from bertkit.tasks.classification import Classification, MultiLabelClassification, TextTask
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.regression import Regression
from bertkit.tasks.task import Encoded, Task, TaskInputs
from bertkit.tasks.windows import cut_into_windows, surround, text_windows
from bertkit.tokenizer.wordpiece import Tokenizer

MOST_VALUES = 1 << 20
"""The largest width of a vector; a damaged `bertkit.json` could demand any memory."""


@dataclass(frozen=True)
class ImageTask(Task):
    """A task on an image with a text: what the task types have in common."""

    image_width: int = 0
    """The width of an image's vectors."""
    image_size: int = 0
    """The side in pixels to which pictures are scaled; 0 for features."""
    patch_size: int = 0
    """The side in pixels of a picture's patches; 0 for features."""
    image_boxes: bool = False
    """Whether features end with the four numbers of a box."""
    network: str = ""
    """mmbt, vilbert, or "" for that of the weights to initialise from, else mmbt."""
    co_layers: tuple[int, ...] = ()
    """For vilbert: the text's layers before which the streams attend to each other."""
    reads_images = True

    def __post_init__(self) -> None:
        """Check the sizes and the network.

        Raises:
            BertkitError: a size is impossible (code "image-size"), or see `check_network`.
        """
        if isinstance(self, Classification):
            Classification.__post_init__(self)
        check_network(self.network, self.co_layers, "labels")
        if self.grid is not None:
            self.grid.check()
        least = BOX + 1 if self.box else 1
        wanted = self.grid.width if self.grid else min(max(least, self.image_width), MOST_VALUES)
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

    @property
    def box(self) -> int:
        """The number of values at the end of a vector that are its box."""
        return BOX if self.image_boxes and not self.image_size else 0

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`; the first training image determines what images are."""
        return replace(super().from_data(data), **image_settings(data))

    def initialised_from(self, start: PretrainedWeights) -> Self:
        """See `Task`; without another choice, the network is that of the weights."""
        found = start.details.get("settings")
        settings: dict[str, Any] = found if isinstance(found, dict) else {}
        given = str(settings.get("network") or ("mmbt" if "image_width" in settings else ""))
        if given and self.network not in ("", given):
            raise BertkitError(
                f"{start.path} is a model of the network {given}; leave --image-network out, or "
                "choose another model",
                code="image-network",
            )
        for name in ("image_size", "patch_size", "image_boxes", "image_width"):
            here, there = getattr(self, name), settings.get(name, getattr(self, name))
            if here != there:
                raise BertkitError(
                    f"{start.path} reads images with {name.replace('_', ' ')} {there}, and here it "
                    f"is {here}; make the images in the same way, or choose another model",
                    code="image-shape",
                )
        made = replace(self, network=self.network or given or "mmbt")
        if made.network == "mmbt":
            return made
        known = tuple(settings.get("co_layers") or ())
        layers = self.co_layers or known or upper_half(start.config.num_hidden_layers)
        if known not in ((), layers):
            raise BertkitError(
                f"{start.path} attends to images before the layers {known}; leave --co-layers out",
                code="image-network",
            )
        return replace(made, co_layers=layers)

    def build(self, config: ModelConfig) -> ClassificationModel:
        """See `Task`; without a width, as in a damaged `bertkit.json`, no weights fit."""
        classes = len(self.labels) or 1
        if self.network != "vilbert":
            return ImageTextModel(config, classes, max(1, self.image_width), self.grid)
        return self.build_streams(config, classes)

    def build_streams(
        self, config: ModelConfig, classes: int, *, masked: bool = False
    ) -> TwoStreamModel:
        """Build ViLBERT; see `TwoStreamModel`."""
        patches = self.grid.side**2 if self.grid else 0
        width = max(1, self.image_width - self.box)
        return TwoStreamModel(
            config, classes, width, self.co_layers, patches=patches, masked=masked
        )

    def read_image(self, value: Any, place: str) -> np.ndarray:
        """Return the vectors of an image that is given in memory; see `images.read_image`."""
        return read_image(value, place, self.grid)

    def blank_image(self) -> np.ndarray:
        """Return an image that the model can read: zero features, or a black picture."""
        pixels = np.zeros((1, 1, CHANNELS), np.uint8)
        return pixels if self.grid else np.zeros((1, self.image_width), np.float32)

    def regions(self, image: np.ndarray) -> Regions:
        """Return the vectors and boxes of an image for ViLBERT."""
        if self.grid is not None:
            return Regions(image, grid_boxes(self.grid))
        if not self.box:
            return Regions(image, np.zeros((len(image), BOX), np.float32))
        return Regions(image[:, :-BOX], image[:, -BOX:])

    def checked_image(self, given: TextExample | ChoiceExample) -> np.ndarray:
        """Return the image of an input, after checking that it is one that the model reads.

        Raises:
            BertkitError: there is none (code "image-missing"), it has another form (code
                "image-kind" or "image-shape"), or a box is outside of it (code "image-box").
        """
        image, grid = given.image, self.grid
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
        if self.box:
            check_boxes(image[:, -BOX:], given.place)
        return image


def image_settings(data: TaskInputs) -> dict[str, Any]:
    """Return the settings of `ImageTask` for training data, whose first image decides the sizes.

    Raises:
        BertkitError: there is no room for boxes in its vectors (code "image-box").
    """
    image, place, columns = data.train[0].image, data.train[0].place, data.columns
    pictures = image.dtype == np.uint8
    if columns.image_boxes and (pictures or image.shape[1] <= BOX):
        raise BertkitError(
            f"{place}: --image-boxes needs features that are followed by the four numbers of a box",
            code="image-box",
        )
    return {
        "image_width": image.shape[1],
        "image_size": columns.image_size if pictures else 0,
        "patch_size": columns.patch_size if pictures else 0,
        "image_boxes": columns.image_boxes,
        "network": columns.image_network,
        "co_layers": columns.co_layers,
    }


def check_boxes(boxes: np.ndarray, place: str) -> None:
    """Check boxes (regions, 4).

    Raises:
        BertkitError: a box is not inside the image (code "image-box").
    """
    left, top, right, bottom = boxes.T
    wrong = (boxes < 0).any(axis=1) | (boxes > 1).any(axis=1) | (left > right) | (top > bottom)
    if wrong.any():
        number = int(wrong.argmax())
        raise BertkitError(
            f"{place}: the box of region {number} is {boxes[number].tolist()}; left, top, right "
            "and bottom must be fractions from 0 to 1 of the image's width and height, in this "
            "order",
            code="image-box",
        )


@dataclass(frozen=True)
class ImageTextTask(ImageTask, TextTask):
    """A task on an image with one text."""

    def encode_windows(
        self, given: TextExample, text: list[int], pair: list[int] | None, tokenizer: Tokenizer
    ) -> tuple[list[Encoded], np.ndarray | Regions]:
        """See `TextTask`; every window is read with the whole image.

        Raises:
            BertkitError: there are two texts (code "image-pair"), an image leaves no room for text
                (code "image-length"), or see `checked_image`.
        """
        if given.pair is not None:
            raise BertkitError(
                f"{given.place}: the model reads an image and one text; leave the second text out",
                code="image-pair",
            )
        image = self.checked_image(given)
        if self.network == "vilbert":
            windows = text_windows(text, None, tokenizer, self.max_length, self.stride)
            return windows, self.regions(image)
        room = self.max_length - len(image) - 3
        if room < 2:
            raise BertkitError(
                f"{given.place}: an image of {len(image)} vectors leaves no room for text in "
                f"{self.max_length} tokens; give fewer vectors, a larger --patch-size, a larger "
                "--max-length, or --image-network vilbert",
                code="image-length",
            )
        placeholders = [tokenizer.pad_id] * len(image)
        cut = cut_into_windows(text, room, self.stride)
        return [surround(placeholders, window, tokenizer) for window in cut], image


@dataclass(frozen=True)
class ImageClassification(ImageTextTask, Classification):
    """A task with one label for each image with a text."""


@dataclass(frozen=True)
class ImageMultiLabelClassification(ImageTextTask, MultiLabelClassification):
    """A task with any number of labels for each image with a text."""


@dataclass(frozen=True)
class ImageRegression(ImageTextTask, Regression):
    """A task with one number for each image with a text."""


@dataclass(frozen=True)
class ImageChoice(ImageTask, MultipleChoice):
    """A task that picks one of the choices of an image with a text, for ViLBERT only."""

    def initialised_from(self, start: PretrainedWeights) -> Self:
        """See `Task`; MMBT has no segment for the choice."""
        made = super().initialised_from(start)
        if made.network != "vilbert":
            raise BertkitError(
                "multiple-choice with images needs --image-network vilbert", code="image-network"
            )
        return made

    def image_part(self, given: ChoiceExample) -> Regions:
        """See `MultipleChoice`."""
        return self.regions(self.checked_image(given))


IMAGE_TASKS: Mapping[str, type[Task]] = {
    task.task_type: task
    for task in (ImageClassification, ImageMultiLabelClassification, ImageRegression, ImageChoice)
}
"""Task type -> the task on images with texts."""
