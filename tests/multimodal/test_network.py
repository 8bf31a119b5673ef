"""The seam for embeddings given from outside, against a plain reference for one row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.datasets.examples import TextExample
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig, run_layers
from bertkit.model.inference import prepare_encoder
from bertkit.multimodal.images import PatchGrid
from bertkit.multimodal.model import ImageTextModel, PackedImages
from bertkit.pretraining_data.batch import pack
from bertkit.tasks.classification import Classification
from bertkit.tasks.images import ImageClassification, ImageRegression
from bertkit.tasks.saved import load_task_model
from bertkit.tasks.task import Items, make_batch, run_model
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import WORDS, tiny_config

GRID = PatchGrid(8, 4)
CPU = torch.device("cpu")


def image_task(grid: PatchGrid | None = None, **settings: int) -> ImageClassification:
    sizes = (grid.width, *grid) if grid else (5, 0, 0)
    names = ("image_width", "image_size", "patch_size")
    return ImageClassification(
        ("no", "yes"), **{"max_length": 40, **dict(zip(names, sizes, strict=True)), **settings}
    )


def examples(grid: PatchGrid | None = None, count: int = 6) -> list[TextExample]:
    """Texts of different lengths, with images of different numbers of vectors if of features."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        text = " ".join(rng.choice(WORDS, number * 2 + 1))
        if grid is None:
            image = rng.normal(size=(1 + number % 3, 5)).astype(np.float32)
        else:
            image = rng.integers(0, 256, (grid.side**2, grid.width), dtype=np.uint8)
        found.append(TextExample(str(number), text, None, None, f"t:{number}", image))
    return found


def network(task: ImageClassification, config: ModelConfig) -> ImageTextModel:
    torch.manual_seed(1)
    model = task.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def reference(
    model: ImageTextModel, image: np.ndarray, ids: list[int], special: Tokenizer
) -> Tensor:
    """The logits of one row, whose embeddings are concatenated one after the other."""
    encoder, table = model.encoder, model.encoder.word_embeddings.weight
    vectors = torch.from_numpy(image).float()
    if model.image.grid is not None:
        vectors = vectors / 127.5 - 1
    tokens = F.linear(vectors, model.image.projection.weight, model.image.projection.bias)
    if model.image.grid is not None:
        side = model.image.grid.side
        tokens = tokens + torch.stack(
            [
                model.image.rows.weight[row] + model.image.columns.weight[column]
                for row in range(side)
                for column in range(side)
            ]
        )
    cls, sep = table[special.cls_id][None], table[special.sep_id][None]
    first = torch.cat([cls, tokens, sep])
    second = torch.cat([table[ids], sep])
    words = torch.cat([first, second])
    segments = torch.cat(
        [
            encoder.segment_embeddings.weight[0].expand_as(first),
            encoder.segment_embeddings.weight[1].expand_as(second),
        ]
    )
    embedded = encoder.embedding_norm(
        words + encoder.position_embeddings.weight[: len(words)] + segments
    )
    if encoder.projection is not None:
        embedded = encoder.projection(embedded)
    hidden = run_layers(encoder.stack, embedded, pack([[0] * len(words)]), None)
    return model.classifier(encoder.pool(hidden[:1]))


@pytest.mark.parametrize("grid", [None, GRID])
@pytest.mark.parametrize("embedding_size", [0, 16])
def test_packed_rows_equal_concatenated_embeddings(
    tokenizer: Tokenizer, grid: PatchGrid | None, embedding_size: int
) -> None:
    task = image_task(grid)
    model = network(task, tiny_config(tokenizer, embedding_size=embedding_size))
    inputs = examples(grid)
    with torch.inference_mode():
        found = run_model(model, task.items(inputs, tokenizer), CPU)
        for given, [logits] in zip(inputs, found, strict=True):
            ids = tokenizer.encode(given.text).ids
            wanted = reference(model, given.image, list(ids), tokenizer)
            np.testing.assert_allclose(logits, wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("grid", [None, GRID])
def test_a_batch_does_not_change_a_row(tokenizer: Tokenizer, grid: PatchGrid | None) -> None:
    task, inputs = image_task(grid), examples(grid)
    model = network(task, tiny_config(tokenizer))
    items = task.items(inputs, tokenizer)
    together = run_model(model, items, CPU)
    alone = [run_model(model, Items([item], 1, 0, {}), CPU)[0] for item in reversed(items.items)]
    for one, other in zip(together, reversed(alone), strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-5)


def test_both_the_image_and_the_text_matter(tokenizer: Tokenizer) -> None:
    task = image_task()
    model = network(task, tiny_config(tokenizer))
    [given] = examples(count=1)
    others = [given._replace(image=given.image + 1), given._replace(text=f"{given.text} river")]
    first, *changed = run_model(model, task.items([given, *others], tokenizer), CPU)
    for one in changed:
        assert np.abs(one[0] - first[0]).max() > 1e-3


def test_every_vector_is_one_token_of_segment_a(tokenizer: Tokenizer) -> None:
    task, inputs = image_task(), examples()
    items = task.items(inputs, tokenizer)
    batch = make_batch([part for item in items.items for part in item.parts])
    packed = batch.packed
    assert isinstance(packed, PackedImages)
    assert len(packed.vectors) == sum(len(given.image) for given in inputs)
    assert packed.segment_ids[packed.vector_rows].max() == 0
    for number, given in enumerate(inputs):
        start = int(packed.cu_seqlens[batch.place[number]])
        count = len(given.image)
        own = (packed.vector_rows > start) & (packed.vector_rows <= start + count)
        np.testing.assert_array_equal(packed.vectors[own].numpy(), given.image)
        assert packed.ids[start] == tokenizer.cls_id
        assert packed.ids[start + 1 + count] == tokenizer.sep_id
        assert int(packed.segment_ids[start + 2 + count]) == 1


def test_long_texts_have_windows_that_contain_the_image(tokenizer: Tokenizer) -> None:
    task = image_task(max_length=20)
    [given] = examples(count=1)
    text = " ".join(WORDS[:20] * 3)
    items = task.items([given._replace(text=text)], tokenizer)
    [item] = items.items
    assert items.windowed == 1
    assert all(len(part.sequences[0].ids) <= 20 for part in item.parts)
    room = 20 - len(given.image) - 3
    assert len(item.parts) == 1 + -(-(60 - room) // (room - room // 4))
    for part in item.parts:
        assert part.image is given.image
    refused = given._replace(image=np.zeros((16, 5), np.float32))
    with pytest.raises(BertkitError, match="t:0") as found:
        task.items([refused], tokenizer)
    assert found.value.code == "image-length"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embedding_size": 16},
        {"share_layers": True, "embedding_size": 16},
        {"pooler_act": "gelu", "embedding_size": 16},
        {"direction": "left_to_right"},
    ],
)
def test_a_saved_model_of_any_family_gives_the_same(
    tokenizer: Tokenizer, changes: dict[str, Any], tmp_path: Path
) -> None:
    task, inputs = image_task(GRID), examples(GRID)
    model = network(task, tiny_config(tokenizer, **changes))
    details = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
    save_model(tmp_path / "model", model, tokenizer, details)
    loaded = load_task_model(tmp_path / "model", CPU)
    assert loaded.task == task
    items = task.items(inputs, tokenizer)
    for one, other in zip(
        run_model(loaded.model, items, CPU), run_model(model, items, CPU), strict=True
    ):
        np.testing.assert_array_equal(one[0], other[0])
    with pytest.raises(BertkitError) as found:
        read_pretrained(tmp_path / "model").build(Encoder, keep_head=False)
    assert found.value.code == "image-model"


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_inference_layers_read_images(tokenizer: Tokenizer, mode: str) -> None:
    task, inputs = image_task(GRID), examples(GRID)
    model = network(task, tiny_config(tokenizer))
    items = task.items(inputs, tokenizer)
    wanted = run_model(model, items, CPU)
    prepare_encoder(model.encoder, mode)
    for one, other in zip(run_model(model, items, CPU), wanted, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-4 if mode == "fp32" else 0.1)


def test_inputs_that_the_task_does_not_read(tokenizer: Tokenizer) -> None:
    features, pictures = image_task(), image_task(GRID)
    [given], [picture] = examples(count=1), examples(GRID, 1)
    wide = given._replace(image=np.zeros((2, 6), np.float32))
    small = picture._replace(image=np.zeros((1, GRID.width), np.uint8))
    texts = Classification(("no", "yes"), max_length=40)
    for task, wrong, code in (
        (features, given._replace(image=None), "image-missing"),
        (features, given._replace(pair="b"), "image-pair"),
        (features, picture, "image-kind"),
        (features, wide, "image-shape"),
        (pictures, given, "image-kind"),
        (pictures, small, "image-shape"),
        (texts, given, "image-unexpected"),
    ):
        with pytest.raises(BertkitError) as found:
            task.items([wrong], tokenizer)
        assert found.value.code == code
        assert str(found.value).startswith("t:0: ")


def test_impossible_sizes_are_refused() -> None:
    for sizes in ((1 << 30, 0, 0), (5, 8, 4), (48, 8, 3)):
        with pytest.raises(BertkitError) as found:
            ImageRegression(image_width=sizes[0], image_size=sizes[1], patch_size=sizes[2])
        assert found.value.code == "image-size"
    assert replace(image_task(), image_width=7).image_width == 7
