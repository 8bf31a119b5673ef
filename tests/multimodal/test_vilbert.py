"""The two streams of ViLBERT against a plain reference for one pair, and against LXMERT."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LxmertConfig
from transformers.models.lxmert.modeling_lxmert import LxmertCrossAttentionLayer

from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.datasets.columns import TextColumns
from bertkit.datasets.examples import TextExample
from bertkit.datasets.image_columns import ALIGNED
from bertkit.datasets.records import as_source
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, activation
from bertkit.model.heads import PretrainingModel
from bertkit.model.inference import prepare_encoder
from bertkit.multimodal.images import PatchGrid
from bertkit.multimodal.regions import (
    PackedStreams,
    Regions,
    draw_rows,
    find_partners,
    grid_boxes,
    take_sequences,
    with_regions,
)
from bertkit.multimodal.vilbert import CrossLayer, TwoStreamModel, cross_attention
from bertkit.pretraining_data.batch import Packed, from_arrays, pack
from bertkit.tasks.alignment import RANDOM, Alignment
from bertkit.tasks.images import ImageClassification
from bertkit.tasks.saved import load_task_model
from bertkit.tasks.task import Items, Task, make_batch, run_model
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast
from tests.conftest import WORDS, tiny_config

GRID = PatchGrid(8, 4)
CPU = torch.device("cpu")


def boxed(rng: np.random.Generator, regions: int, width: int = 5) -> np.ndarray:
    """Features followed by boxes."""
    corners = np.sort(rng.random((regions, 2, 2)), axis=1).reshape(regions, 4)
    return np.concatenate([rng.normal(size=(regions, width)), corners], 1).astype(np.float32)


def examples(count: int = 6, grid: PatchGrid | None = None) -> list[TextExample]:
    """Texts of different lengths, with images of different numbers of regions if of features."""
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        text = " ".join(rng.choice(WORDS, (number * 5) % 9 + 1))
        image = boxed(rng, 1 + number % 3)
        if grid is not None:
            image = rng.integers(0, 256, (grid.side**2, grid.width), dtype=np.uint8)
        found.append(TextExample(str(number), text, None, None, f"t:{number}", image))
    return found


def image_task(grid: PatchGrid | None = None, **changes: object) -> ImageClassification:
    sizes = (grid.width, *grid) if grid else (9, 0, 0)
    found = dict(zip(("image_width", "image_size", "patch_size"), sizes, strict=True))
    found |= {"image_boxes": grid is None, "network": "vilbert", "max_length": 40}
    return ImageClassification(("no", "yes"), **{**found, **changes})  # type: ignore[arg-type]


def alignment(**changes: object) -> Alignment:
    made = {**vars(image_task()), "labels": (RANDOM, ALIGNED), "mask_id": 4}
    return Alignment(**{**made, **changes})  # type: ignore[arg-type]


def network(task: Task, tokenizer: Tokenizer, **changes: object) -> TwoStreamModel:
    torch.manual_seed(1)
    model = task.build(tiny_config(tokenizer, **changes))
    assert isinstance(model, TwoStreamModel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def streams(task: Task, inputs: list[TextExample], tokenizer: Tokenizer) -> PackedStreams:
    items = task.items(inputs, tokenizer)
    packed = make_batch([part for item in items.items for part in item.parts]).packed
    assert isinstance(packed, PackedStreams)
    return packed


# The reference: one pair, without boundaries, whose attention is written out --------------------


def attend(layer: CrossLayer, own: Tensor, other: Tensor) -> Tensor:
    """The output of a co-attention layer for one sequence."""
    width, heads = own.shape[1], layer.config.num_attention_heads
    query = F.linear(own, layer.query.weight, layer.query.bias)
    both = F.linear(other, layer.key_value.weight, layer.key_value.bias)
    parts = []
    for head in range(heads):
        at = slice(head * width // heads, (head + 1) * width // heads)
        key, value = both[:, :width][:, at], both[:, width:][:, at]
        scores = query[:, at] @ key.T / math.sqrt(width // heads)
        parts.append(scores.softmax(-1) @ value)
    hidden = layer.attention_norm(layer.attention_output(torch.cat(parts, 1)) + own)
    return layer.output_norm(
        layer.output(activation(layer.intermediate(hidden), layer.config)) + hidden
    )


def reference(model: TwoStreamModel, ids: Tensor, regions: Regions) -> Tensor:
    """The logits of one pair."""
    vectors = torch.from_numpy(regions.vectors).float()
    vectors = vectors / 127.5 - 1 if regions.vectors.dtype == np.uint8 else vectors
    vectors = torch.cat([vectors.mean(0, keepdim=True), vectors])
    left, top, right, bottom = torch.from_numpy(regions.boxes).T
    areas = (right - left) * (bottom - top)
    boxes = torch.stack([left, top, right, bottom, areas], 1)
    boxes = torch.cat([torch.tensor([[0.0, 0, 1, 1, 1]]), boxes])
    image = model.image.features(vectors) + model.image.boxes(boxes)
    if model.image.places is not None:
        image = image + model.image.places.weight[: len(image)]
    image = model.image.norm(image)
    one, other = pack([ids.tolist()]), pack([[0] * len(image)])
    text, blocks = model.encoder.embed(one), iter(model.image.blocks)
    for number, layer in enumerate(model.encoder.stack):
        if number in model.co_layers:
            block = next(blocks)
            text, image = attend(block.text, text, image), attend(block.image, image, text)
            image = block.layer(image, other)
        text = layer(text, one)
    pooled = model.encoder.pool(text[:1]) * torch.tanh(model.image.pooler(image[:1]))
    return model.classifier(pooled)


@pytest.mark.parametrize("grid", [None, GRID])
@pytest.mark.parametrize("co_layers", [(), (0, 1), (0,)])
def test_packed_pairs_equal_the_reference(
    tokenizer: Tokenizer, grid: PatchGrid | None, co_layers: tuple[int, ...]
) -> None:
    task, inputs = image_task(grid, co_layers=co_layers), examples(grid=grid)
    model = network(task, tokenizer)
    items = task.items(inputs, tokenizer)
    with torch.inference_mode():
        found = run_model(model, items, CPU)
        for given, item, [logits] in zip(inputs, items.items, found, strict=True):
            ids = torch.from_numpy(item.parts[0].sequences[0].ids)
            wanted = reference(model, ids, task.regions(given.image))
            np.testing.assert_allclose(logits, wanted.numpy(), atol=1e-5)


def test_a_batch_does_not_change_a_pair_and_both_streams_matter(tokenizer: Tokenizer) -> None:
    task, inputs = image_task(), examples()
    model = network(task, tokenizer)
    items = task.items(inputs, tokenizer)
    together = run_model(model, items, CPU)
    for item, rows in zip(items.items, together, strict=True):
        [[alone]] = run_model(model, Items([item], 1, 0, {}), CPU)
        np.testing.assert_allclose(rows[0], alone, atol=1e-5)
    moved = inputs[2].image.copy()
    moved[0, -4:] = (0, 0, 1, 1)
    for changes in ({"text": "river"}, {"image": inputs[3].image}, {"image": moved}):
        [[found]] = run_model(model, task.items([inputs[2]._replace(**changes)], tokenizer), CPU)
        assert np.abs(found - together[2][0]).max() > 1e-4


def test_pairs_of_a_batch_equal_pairs_by_themselves(tokenizer: Tokenizer) -> None:
    task, inputs = image_task(), examples()
    model = network(task, tokenizer)
    packed = streams(task, inputs, tokenizer)
    pairs = [0, 0, 5, 2], [3, 0, 1, 1]
    with torch.inference_mode():
        found = model.pair_logits(packed, pairs)
        for row, text, image in zip(found, *pairs, strict=True):
            start, end = packed.cu_seqlens[text : text + 2].tolist()
            begin, stop = packed.images.cu_seqlens[image : image + 2].tolist()
            regions = Regions(
                packed.images.vectors[begin + 1 : stop].numpy(),
                packed.images.boxes[begin + 1 : stop, :4].numpy(),
            )
            wanted = reference(model, packed.ids[start:end], regions)[0]
            torch.testing.assert_close(row, wanted, atol=1e-5, rtol=0)


def test_a_co_attention_layer_equals_that_of_lxmert(tokenizer: Tokenizer) -> None:
    config = tiny_config(tokenizer)
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    theirs = LxmertCrossAttentionLayer(
        LxmertConfig(num_attention_heads=config.num_attention_heads, **sizes)
    ).eval()
    ours = CrossLayer(config).eval()
    attention, output = theirs.att, theirs.output
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
        for name in ("weight", "bias"):
            getattr(ours.query, name).copy_(getattr(attention.query, name))
            both = [getattr(attention.key, name), getattr(attention.value, name)]
            getattr(ours.key_value, name).copy_(torch.cat(both))
            getattr(ours.attention_output, name).copy_(getattr(output.dense, name))
            getattr(ours.attention_norm, name).copy_(getattr(output.LayerNorm, name))
        texts, images = pack([[1] * 5, [1] * 3, [1]]), pack([[1] * 2, [1] * 7, [1] * 4])
        hidden, others = (torch.randn(len(one.ids), config.hidden_size) for one in (texts, images))
        found = ours.attend(hidden, texts, others, images)
        rows = zip(*(hidden.split(texts.lengths), others.split(images.lengths)), strict=True)
        wanted = [theirs(own[None], other[None])[0][0] for own, other in rows]
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-5, rtol=0)


def test_cross_attention_equals_its_definition_with_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = pack([[1] * 4, [1] * 2, [1] * 6]), pack([[1] * 3, [1], [1] * 5])
    shapes = [(12, 2, 8), (9, 2, 8), (9, 2, 8)]
    given = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]

    def number(packed: Packed) -> Tensor:
        return torch.arange(3).repeat_interleave(packed.cu_seqlens.diff())

    query, key, value = given
    apart = number(queries)[:, None] != number(keys)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(8)
    weights = scores.masked_fill(apart, -math.inf).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, value)
    found = cross_attention(query, key, value, queries, keys)
    torch.testing.assert_close(found, wanted)
    upward = torch.randn(wanted.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad(found, given, upward),
        torch.autograd.grad(wanted, given, upward),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    dropped = cross_attention(query, key, value, queries, keys, dropout=0.5)
    assert not torch.allclose(dropped, wanted)


# Batches ----------------------------------------------------------------------------------------


def test_streams_are_packed_apart(tokenizer: Tokenizer) -> None:
    inputs = examples()
    packed = streams(image_task(), inputs, tokenizer)
    assert len(packed.ids) == sum(len(tokenizer.encode(one.text).ids) + 2 for one in inputs)
    assert len(packed.images.vectors) == sum(len(one.image) + 1 for one in inputs)
    assert len(packed.images.cu_seqlens) == len(packed.cu_seqlens) == len(inputs) + 1
    first = packed.images.vectors[packed.images.first_tokens]
    assert first.shape == (len(inputs), 5)
    box = packed.images.boxes[packed.images.first_tokens]
    np.testing.assert_array_equal(box, np.tile([0, 0, 1, 1, 1], (len(inputs), 1)))
    parts = image_task().items(inputs, tokenizer).items[0].parts
    assert parts[0].tokens == len(parts[0].sequences[0].ids) + len(inputs[0].image) + 1


def test_patches_have_the_boxes_of_their_grid() -> None:
    boxes = grid_boxes(GRID)
    np.testing.assert_array_equal(boxes[1], [0.5, 0, 1, 0.5])
    np.testing.assert_array_equal(boxes[2], [0, 0.5, 0.5, 1])
    pixels = np.full((4, 48), 255, np.uint8)
    images = with_regions(pack([[1, 2]]), [Regions(pixels, boxes)]).images
    assert (images.vectors == 1).all()
    np.testing.assert_array_equal(images.boxes[1:, 4], [0.25] * 4)


def test_sequences_are_taken_and_rows_drawn() -> None:
    packed = pack([[1] * 4, [1] * 2, [1] * 6, [1] * 2])
    taken, rows = take_sequences(packed, [2, 0, 2])
    assert rows.tolist() == [*range(6, 12), *range(4), *range(6, 12)]
    assert (taken.lengths, taken.max_seqlen) == ([6, 4, 6], 6)
    counts = torch.tensor([2, 0, 3, 1])
    seen = torch.zeros(14)
    for _ in range(200):
        drawn = draw_rows(packed, counts, 6, last=True)
        inside = torch.bucketize(drawn, packed.cu_seqlens[1:], right=True)
        assert inside.bincount(minlength=4).tolist() == counts.tolist()
        seen[drawn] += 1
    assert not seen[packed.first_tokens.long()].any()
    assert seen[packed.position_ids > 0][[0, 1, 2, 4, 5, 6, 7, 8]].min() > 60
    few = torch.tensor([2, 0, 3, 0])
    ends = torch.stack([torch.isin(packed.last_tokens, draw_rows(packed, few, 5, last=False))] * 2)
    assert not ends.any()


# The network and its weights --------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"embedding_size": 16, "share_layers": True}])
@pytest.mark.parametrize("masked", [None, False, True])
def test_a_saved_model_gives_the_same(
    tokenizer: Tokenizer, masked: bool | None, changes: dict[str, object], tmp_path: Path
) -> None:
    task = image_task() if masked is None else alignment(masked=masked, co_layers=(1,))
    model = network(task, tokenizer, **changes)
    details = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
    save_model(tmp_path / "model", model, tokenizer, details)
    loaded = load_task_model(tmp_path / "model", CPU)
    assert loaded.task == task
    items = task.items(examples(), tokenizer)
    for one, other in zip(
        run_model(loaded.model, items, CPU), run_model(model, items, CPU), strict=True
    ):
        np.testing.assert_array_equal(one[0], other[0])
    with pytest.raises(BertkitError) as found:
        read_pretrained(tmp_path / "model").build(Encoder, keep_head=False)
    assert found.value.code == "image-model"


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_inference_layers_serve_the_text_stream(tokenizer: Tokenizer, mode: str) -> None:
    task = image_task(GRID, co_layers=(0,))
    model = network(task, tokenizer)
    items = task.items(examples(grid=GRID), tokenizer)
    wanted = run_model(model, items, CPU)
    prepare_encoder(model.encoder, mode)
    for one, other in zip(run_model(model, items, CPU), wanted, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-4 if mode == "fp32" else 0.1)


@pytest.fixture(scope="module")
def bert(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PretrainedWeights:
    """A pre-trained BERT with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert") / "model"
    save_model(folder, PretrainingModel(tiny_config(tokenizer)), tokenizer, {"task": "pretraining"})
    return read_pretrained(folder)


def test_the_text_stream_and_its_masked_head_come_from_bert(bert: PretrainedWeights) -> None:
    task = alignment(masked=True, network="").initialised_from  # "" is MMBT for a BERT
    with pytest.raises(BertkitError) as found:
        task(bert)
    assert found.value.code == "image-task"
    made = alignment(masked=True).initialised_from(bert)
    assert made.mask_id == bert.tokenizer.mask_id
    loaded = bert.build(made.build, keep_head=False)
    assert loaded.model.mlm is not None
    dense = bert.tensors["cls.predictions.transform.dense.weight"]
    torch.testing.assert_close(loaded.model.mlm.dense.weight, dense)
    text = loaded.model.encoder.position_embeddings.weight
    torch.testing.assert_close(text, bert.tensors["bert.embeddings.position_embeddings.weight"])
    assert {name.split(".")[0] for name in loaded.missing_keys} == {"image", "classifier"}


def test_the_network_is_that_of_the_weights(
    bert: PretrainedWeights, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    task = image_task(network="")
    assert task.initialised_from(bert).network == "mmbt"
    settings = alignment(masked=True, co_layers=(1,)).settings()
    start = replace(bert, details={"settings": settings})
    made = task.initialised_from(start)
    assert (made.network, made.co_layers) == ("vilbert", (1,))
    assert image_task().initialised_from(bert).co_layers == (1,)  # the upper half
    for wrong in ({"network": "mmbt"}, {"network": "resnet"}, {"co_layers": (0,)}):
        with pytest.raises(BertkitError) as found:
            image_task(**wrong).initialised_from(start)
        assert found.value.code == "image-network"
    for other in ({"image_width": 12}, {"image_boxes": False}):
        with pytest.raises(BertkitError) as found:
            image_task(**other).initialised_from(start)
        assert found.value.code == "image-shape"
    for call in (
        lambda: image_task(co_layers=(7,)).build(tiny_config(tokenizer)),
        lambda: image_task(network="mmbt", co_layers=(1,)),
        lambda: image_task().build(tiny_config(tokenizer, direction="left_to_right")),
    ):
        with pytest.raises(BertkitError) as found:
            call()
        assert found.value.code == "image-network"


# Alignment and masks ----------------------------------------------------------------------------


def test_texts_are_read_with_images_of_other_pairs(tokenizer: Tokenizer) -> None:
    task = alignment()
    inputs = [one._replace(label=ALIGNED) for one in examples(4)]
    inputs += [inputs[1]._replace(image=inputs[0].image), inputs[2]._replace(text="the river")]
    items = task.items(inputs, tokenizer)
    parts = [part for item in items.items for part in item.parts]
    batch = make_batch(parts, task.targets)
    partners = batch.packed.partners
    ordered = [inputs[i] for i in np.argsort(batch.place)]
    for own, other in enumerate(partners):
        assert ordered[own].text != ordered[other].text
        assert not np.array_equal(ordered[own].image, ordered[other].image)
    alone = make_batch(parts[:1], task.targets)
    assert alone.packed.partners == (-1,)
    same = [one for one in parts if np.array_equal(one.sequences[0].ids, parts[0].sequences[0].ids)]
    assert make_batch(same, task.targets).packed.partners == (-1,) * len(same)
    model = network(task, tokenizer)
    assert torch.isfinite(task.objective(model, alone)["alignment_loss"].value)

    scored = task.scored_inputs(inputs)
    added = scored[len(inputs) :]
    assert [one.label for one in added] == [RANDOM] * len(inputs)
    assert len({one.id for one in scored[: len(inputs)]}) <= len(inputs)
    for one in added:
        own = next(given for given in inputs if f"{given.id}-{RANDOM}" == one.id)
        assert not np.array_equal(own.image, one.image)
    assert task.scored_inputs(scored[:3] + added[:1])[3:4] == added[:1]


@pytest.mark.parametrize("kinds", [(1, 3), (2, 2), (3, 1), (4, 5)])
def test_the_partner_is_the_next_pair_with_another_text_and_image(kinds: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(kinds))
    texts, pictures = rng.integers(kinds[0], size=20), rng.integers(kinds[1], size=20)
    packed = from_arrays(texts, np.zeros_like(texts), np.ones(20, int))
    images = [Regions(np.full((1, 2), one), np.zeros((1, 4))) for one in pictures]
    for own, found in enumerate(find_partners(packed, images)):
        others = [(own + step) % 20 for step in range(1, 20)]
        wanted = (i for i in others if texts[i] != texts[own] and pictures[i] != pictures[own])
        assert found == next(wanted, -1)


def test_the_rows_of_alignment_need_an_image() -> None:
    columns = TextColumns(image_column="image", image_network="vilbert", image_task="alignment")
    rows = as_source([{"text": "a", "image": [[1.0, 2.0]]}, {"text": "b"}], "test")
    counts = TextCounts()
    assert len(columns.read_labelled(rows, counts, scoring=True, test=True)) == 1
    assert counts.skipped == {"row without column 'image'": 1}


def test_masks_and_losses_are_those_of_the_seed(tokenizer: Tokenizer) -> None:
    task = alignment(masked=True)
    inputs = [one._replace(label=ALIGNED) for one in examples(8)]
    items = task.items(inputs, tokenizer)
    batch = make_batch([part for item in items.items for part in item.parts], task.targets)
    model = network(task, tokenizer).train()
    sums = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        sums.append(task.objective(model, batch))
    names = {"alignment_loss", "alignment_accuracy", "mlm_loss", "mlm_accuracy", "region_loss"}
    assert set(sums[0]) == names
    for name in names:
        assert torch.equal(sums[0][name].value, sums[1][name].value)
    assert not torch.equal(sums[0]["mlm_loss"].value, sums[2]["mlm_loss"].value)
    assert batch.counts["targets"] >= len(inputs) <= batch.counts["regions"]
    for precision in ("bf16", "bf16-residual"):
        torch.manual_seed(3)
        with autocast(CPU, precision):
            found = task.objective(model, batch)
        for name in ("alignment_loss", "mlm_loss", "region_loss"):
            torch.testing.assert_close(found[name].value, sums[0][name].value, rtol=0.1, atol=0.5)

    packed = batch.packed
    targets, counts = batch.tensors, batch.counts
    words = draw_rows(packed, targets["text_targets"], counts["targets"], last=False)
    regions = draw_rows(packed.images, targets["region_targets"], counts["regions"], last=True)
    hidden = task.with_masks(packed, words, regions, tokenizer.size)
    other = torch.ones(len(packed.ids), dtype=torch.bool).index_fill(0, words, value=False)
    assert torch.equal(hidden.ids[other], packed.ids[other])
    assert (hidden.ids[words] == task.mask_id).float().mean() > 0.5
    firsts = packed.images.first_tokens.long()
    differs = (hidden.images.vectors != packed.images.vectors).any(-1)
    assert set(differs.nonzero().flatten().tolist()) <= {*regions.tolist(), *firsts.tolist()}
    assert not hidden.images.vectors[differs.index_fill(0, firsts, value=False)].any()
    # the mean of an image says nothing of the regions that are to be predicted
    others = torch.ones(len(differs), dtype=torch.bool).index_fill(0, regions, value=False)
    others[firsts] = False
    for number, first in enumerate(firsts.tolist()):
        own = slice(first, int(packed.images.cu_seqlens[number + 1]))
        seen = packed.images.vectors[own][others[own]]
        wanted = seen.mean(0) if len(seen) else torch.zeros_like(packed.images.vectors[first])
        torch.testing.assert_close(hidden.images.vectors[first], wanted)
