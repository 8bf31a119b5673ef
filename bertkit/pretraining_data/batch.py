"""The packed batch: consecutive tokens with sequence boundaries instead of padding.

A batch of sequences of lengths 5, 3 and 2 is ten tokens and `cu_seqlens` = [0, 5, 8, 10]. Every
position-wise layer of the network processes exactly those ten tokens; only attention uses the
boundaries.

The names of tensor shapes (`Hidden`, `Rows`, ...) are checked by beartype under pytest only;
elsewhere jaxtyping is not imported, and each is plain `torch.Tensor`. In them, tokens = all tokens
of a packed batch; sequences = its sequences; width = hidden size; targets = masked positions that
have a loss; vocabulary = vocabulary size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING or os.environ.get("BERTKIT_CHECK_SHAPES") != "1":
    TokenIndices: TypeAlias = Tensor
    """(tokens,) integers."""
    Boundaries: TypeAlias = Tensor
    """(sequences + 1,) int32."""
    Hidden: TypeAlias = Tensor
    """(tokens, width)."""
    Rows: TypeAlias = Tensor
    """(rows, width): hidden states of all tokens or of selected ones."""
    Heads: TypeAlias = Tensor
    """(tokens, heads, head width)."""
    Pooled: TypeAlias = Tensor
    """(sequences, width)."""
    TargetIndices: TypeAlias = Tensor
    """(targets,) integers."""
    VocabularyLogits: TypeAlias = Tensor
    """(targets, vocabulary)."""
    NextLogits: TypeAlias = Tensor
    """(sequences, 2)."""
    ClassLogits: TypeAlias = Tensor
    """(sequences or tokens, classes)."""
    SequenceLabels: TypeAlias = Tensor
    """(sequences,) integers."""
else:
    from jaxtyping import Float, Int, Int32

    TokenIndices = Int[Tensor, "tokens"]
    Boundaries = Int32[Tensor, "boundaries"]
    Hidden = Float[Tensor, "tokens width"]
    Rows = Float[Tensor, "rows width"]
    Heads = Float[Tensor, "tokens heads head_width"]
    Pooled = Float[Tensor, "sequences width"]
    TargetIndices = Int[Tensor, "targets"]
    VocabularyLogits = Float[Tensor, "targets vocabulary"]
    NextLogits = Float[Tensor, "sequences 2"]
    ClassLogits = Float[Tensor, "rows classes"]
    SequenceLabels = Int[Tensor, "sequences"]


class EqualLengths(NamedTuple):
    """Consecutive sequences of equal length, which one attention call can take without padding."""

    sequences: int
    length: int


AnyFields = TypeVar("AnyFields", bound="TensorFields")


class TensorFields:
    """A frozen dataclass whose fields are tensors, dicts of tensors, other batches or values."""

    def map_tensors(self: AnyFields, change: Callable[[Tensor], Tensor]) -> AnyFields:
        """Return a copy with a change applied to every tensor."""

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, TensorFields):
                return value.map_tensors(change)
            if isinstance(value, dict) and all(isinstance(v, Tensor) for v in value.values()):
                return {name: change(tensor) for name, tensor in value.items()}
            return value

        return type(self)(**{name: changed(value) for name, value in own_fields(self).items()})

    def to(self: AnyFields, device: torch.device | str) -> AnyFields:
        """Return the same batch on another device.

        On the way to a GPU it passes through page-locked memory, from which the GPU copies while
        the host continues.
        """
        target = torch.device(device)
        return self.map_tensors(lambda tensor: to_device(tensor, target))


def own_fields(batch: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying their values."""
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, without waiting for a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class Packed(TensorFields):
    """One batch of token sequences laid end to end."""

    ids: TokenIndices
    """(tokens,) vocabulary indices."""
    segment_ids: TokenIndices
    """(tokens,) 0 = sentence A, 1 = sentence B."""
    position_ids: TokenIndices
    """(tokens,) 0, 1, 2, ... restarting in each sequence."""
    cu_seqlens: Boundaries
    """(sequences + 1,) int32 cumulative lengths, starting with 0."""
    max_seqlen: int
    """The length of the longest sequence, in tokens."""

    @property
    def first_tokens(self) -> TokenIndices:
        """(sequences,) the index of each sequence's first token, [CLS]."""
        return self.cu_seqlens[:-1]

    @property
    def last_tokens(self) -> TokenIndices:
        """(sequences,) the index of each sequence's last token, [SEP]."""
        return self.cu_seqlens[1:] - 1

    @property
    def owners(self) -> TokenIndices:
        """(tokens,) the index of each token's sequence; the host does not wait for a GPU."""
        numbers = torch.arange(len(self.cu_seqlens) - 1, device=self.cu_seqlens.device)
        return numbers.repeat_interleave(self.cu_seqlens.diff(), output_size=len(self.ids))

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence, in batch order."""
        return self.cu_seqlens.diff().tolist()

    @cached_property
    def equal_lengths(self) -> list[EqualLengths]:
        """Runs of neighbouring sequences of equal length, in batch order.

        A batch sorted by length has one run for each distinct length.
        """
        runs = groupby(self.lengths)
        return [EqualLengths(len(list(run)), length) for length, run in runs]

    @cached_property
    def attention_cache(self) -> dict[Any, Any]:
        """A cache of values that attention computes once per batch and uses in every layer."""
        return {}

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """Return a copy with a change applied to every tensor.

        The copy keeps `lengths`, so that asking for them does not make the host wait for a GPU.
        """
        copy = super().map_tensors(change)
        if "lengths" in self.__dict__ or self.cu_seqlens.device.type == "cpu":
            copy.__dict__["lengths"] = self.lengths
        return copy


def pack(
    sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
) -> Packed:
    """Lay sequences end to end, in the order given.

    Args:
        sequences: the token ids of each sequence, including [CLS] and [SEP]; none may be empty.
        segments: the segment, 0 or 1, of each token; the default is 0 for all.

    Raises:
        ValueError: there is no sequence, one is empty, or the segments differ in length.
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError("pack needs at least one sequence, and none may be empty")
    if segments is not None and [len(row) for row in segments] != lengths:
        raise ValueError("segments must have the lengths of the sequences")
    ids = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    if segments is None:
        segment_ids = np.zeros_like(ids)
    else:
        segment_ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in segments])
    return from_arrays(ids, segment_ids, np.asarray(lengths))


def from_arrays(ids: np.ndarray, segment_ids: np.ndarray, lengths: np.ndarray) -> Packed:
    """Build a `Packed` from ids and segment_ids, (tokens,) int64, and lengths, (sequences,)."""
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    position_ids = np.arange(len(ids)) - np.repeat(cu_seqlens[:-1].astype(np.int64), lengths)
    return Packed(
        ids=torch.from_numpy(ids),
        segment_ids=torch.from_numpy(segment_ids),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=int(max(lengths)),
    )
