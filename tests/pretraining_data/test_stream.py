from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.corpus.prepare import prepare
from bertkit.corpus.store import TokenStore
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.pretraining_data.examples import MaskingOptions, PairOptions
from bertkit.pretraining_data.loader import (
    START,
    BatchBuilder,
    DataPosition,
    ExampleSampler,
    PretrainingBatch,
    StreamStep,
    stream_steps,
)
from bertkit.tokenizer.wordpiece import Tokenizer

LENGTH = 48


def parts(store: TokenStore, seed: int = 0, **masking: bool) -> tuple[ExampleSampler, BatchBuilder]:
    table = ExampleSampler(store, PairOptions(max_length=LENGTH), seed)
    return table, BatchBuilder(store, MaskingOptions(**masking), 7, seed)


def steps(store: TokenStore, count: int, **options: object) -> list[StreamStep]:
    table, builder = parts(store)
    return list(stream_steps(table, builder, batch_size=12, steps=count, **options))


def contents(batches: list[PretrainingBatch]) -> list[tuple[list[int], ...]]:
    """Each example as seen, segments, targets and label, whatever batch it is in; sorted."""
    found = []
    for batch in batches:
        packed = batch.packed
        for index in range(len(batch.next_labels)):
            start, end = packed.cu_seqlens[index].item(), packed.cu_seqlens[index + 1].item()
            inside = (batch.target_positions >= start) & (batch.target_positions < end)
            found.append(
                (
                    packed.ids[start:end].tolist(),
                    packed.segment_ids[start:end].tolist(),
                    (batch.target_positions[inside] - start).tolist(),
                    batch.target_ids[inside].tolist(),
                    [batch.next_labels[index].item()],
                )
            )
    return sorted(found)


@pytest.mark.slow
def test_resuming_anywhere_gives_the_same_batches(store: TokenStore) -> None:
    whole = steps(store, 100)  # several epochs of a small store
    assert whole[-1].after.epoch > 0
    for made in (1, 57, 99):
        rest = steps(store, 100 - made, position=whole[made - 1].after)
        for first, second in zip(whole[made:], rest, strict=True):
            assert first.after == second.after
            assert contents(first.micro_batches) == contents(second.micro_batches)


def test_epochs_use_every_example_once(store: TokenStore) -> None:
    table, _ = parts(store)
    total = sum(len(table.window_rows(0, window)) for window in range(table.windows))
    rows, place = table.take(START, total + 1)
    names = {(row["epoch"], row["window"], row["row"]) for row in rows[:total]}
    assert len(names) == total
    assert {epoch for epoch, _, _ in names} == {0}
    assert place == DataPosition(1, 0, 1)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_same_global_batch(store: TokenStore, world: int, accumulate: int) -> None:
    alone = steps(store, 6)
    count = world * accumulate
    ranks = [steps(store, 6, rank=rank, world=world, micro_batches=count) for rank in range(world)]
    cut = steps(store, 6, micro_batches=count)
    for index, step in enumerate(alone):
        together = [batch for rank in ranks for batch in rank[index].micro_batches]
        assert len(together) == world * accumulate
        assert contents(together) == contents(step.micro_batches)
        for number, batch in enumerate(cut[index].micro_batches):
            own = ranks[number % world][index].micro_batches[number // world]
            assert torch.equal(own.packed.ids, batch.packed.ids), "one process cuts it alike"
        assert {rank[index].after for rank in ranks} == {step.after}
        sizes = [len(batch.packed.ids) for batch in together]
        assert max(sizes) <= 2 * min(sizes) + LENGTH


@pytest.mark.slow
def test_loader_processes_change_nothing(store: TokenStore) -> None:
    alone = steps(store, 10)
    parallel = steps(store, 10, workers=2)
    for first, second in zip(alone, parallel, strict=True):
        assert first.after == second.after
        assert contents(first.micro_batches) == contents(second.micro_batches)


def restored(batch: PretrainingBatch) -> torch.Tensor:
    ids = batch.packed.ids.clone()
    ids[batch.target_positions] = batch.target_ids
    return ids


@pytest.mark.parametrize("whole_words", [False, True])
def test_batches_hold_the_text_and_mask_it_right(store: TokenStore, whole_words: bool) -> None:
    table, builder = parts(store, whole_words=whole_words)
    tokenizer = store.tokenizer
    rows, _ = table.take(START, 300)
    batch = builder[rows]
    packed, ids = batch.packed, restored(batch)
    order = np.argsort(-(rows["a_length"] + rows["b_length"]), kind="stable")
    targets = candidates = 0
    for index, row in enumerate(rows[order]):
        start, end = packed.cu_seqlens[index].item(), packed.cu_seqlens[index + 1].item()
        a = store.arrays(row["a_shard"]).tokens[row["a_start"] :][: row["a_length"]].tolist()
        b = store.arrays(row["b_shard"]).tokens[row["b_start"] :][: row["b_length"]].tolist()
        expected = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        assert ids[start:end].tolist() == expected, "no token is lost or changed by packing"
        segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
        assert packed.segment_ids[start:end].tolist() == segments
        assert packed.position_ids[start:end].tolist() == list(range(len(expected)))
        assert batch.next_labels[index] == row["is_random"]
        inside = (batch.target_positions >= start) & (batch.target_positions < end)
        count = min(7, max(1, round(0.15 * len(expected))))
        found = int(inside.sum())
        assert found <= count if whole_words else found == count
        targets += found
        candidates += len(expected)
    special = torch.tensor([tokenizer.cls_id, tokenizer.sep_id])
    assert not torch.isin(batch.target_ids, special).any()
    assert targets / candidates == pytest.approx(0.15, abs=0.02)


@pytest.mark.parametrize("whole_words", [False, True])
def test_special_pieces_that_the_text_spells_are_no_targets(
    tokenizer: Tokenizer, tmp_path: Path, whole_words: bool
) -> None:
    """Hugging Face's tokenizers make [SEP] of a text's "[SEP]", Google's do not."""
    own = Tokenizer.from_vocabulary(tokenizer.vocabulary, lowercase=True)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(["The [SEP] [MASK] [CLS] river.\n[SEP] [SEP]."] * 40))
    store = prepare([str(text)], own, tmp_path / "store", held_out=0)
    table, builder = parts(store, whole_words=whole_words)
    batch = builder[table.take(START, 60)[0]]
    special = torch.tensor([own.cls_id, own.sep_id, own.mask_id])
    assert torch.isin(restored(batch), special).float().mean() > 0.4
    assert len(batch.target_ids) > 20
    assert not torch.isin(batch.target_ids, special).any()


def test_masks_of_an_example_do_not_depend_on_its_batch(store: TokenStore) -> None:
    table, builder = parts(store)
    rows, _ = table.take(START, 20)
    together = contents([builder[rows]])
    apart = contents([builder[rows[i : i + 1]] for i in range(20)])
    assert together == apart


def test_epochs_mask_differently(store: TokenStore) -> None:
    table, builder = parts(store)
    row = table.window_rows(0, 0)[:1].copy()
    first = builder[row]
    row["epoch"] = 1
    assert not torch.equal(first.target_positions, builder[row].target_positions)


def test_pack_refuses_empty_sequences() -> None:
    with pytest.raises(ValueError, match="empty"):
        pack([[1], []])
    with pytest.raises(ValueError, match="segments"):
        pack([[1, 2]], [[0]])


def test_equal_lengths_are_runs() -> None:
    packed = pack([[1, 2], [3, 4], [5], [6, 7]])
    assert [tuple(run) for run in packed.equal_lengths] == [(2, 2), (1, 1), (1, 2)]
    assert packed.lengths == [2, 2, 1, 2]
    assert packed.max_seqlen == 2
    assert isinstance(packed.to("cpu"), Packed)


def shown_and_targets(store: TokenStore, token: str, pair: str = "nsp") -> PretrainingBatch:
    table = ExampleSampler(store, PairOptions(max_length=LENGTH, pair=pair), 0)
    rows, _ = table.take(START, 40)
    batch = BatchBuilder(store, MaskingOptions(), 7, 0, token)[rows]
    assert batch.counts == {
        "targets": len(batch.target_ids),
        "sequences": 40,
        "tokens": len(batch.packed.ids),
    }
    return batch


@pytest.mark.parametrize("pair", ["nsp", "sop", "single-segment"])
def test_causal_targets_are_the_next_tokens(store: TokenStore, pair: str) -> None:
    batch = shown_and_targets(store, "clm", pair)
    text = restored(shown_and_targets(store, "mlm", pair))
    assert torch.equal(batch.packed.ids, text), "nothing is masked"
    lasts, every = batch.packed.last_tokens.long(), torch.arange(len(text))
    assert torch.equal(batch.target_positions, every[~torch.isin(every, lasts)])
    assert torch.equal(batch.target_ids, text[batch.target_positions + 1])
    ends = torch.isin(batch.target_positions + 1, lasts)
    assert (batch.target_ids[ends] == store.tokenizer.sep_id).all()
    assert batch.counts["targets"] == len(text) - 40


def test_replaced_is_masked_alike(store: TokenStore) -> None:
    """ELECTRA's generator sees the very masks of BERT."""
    one, other = shown_and_targets(store, "mlm"), shown_and_targets(store, "rtd")
    assert contents([one]) == contents([other])
