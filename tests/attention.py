"""Attention by its definition, against which every kernel is compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bertkit.model.native import KERNELS
from bertkit.pretraining_data.batch import Heads, Packed


def reference(projected: Tensor, packed: Packed, causal: bool, dropout: float) -> Heads:
    """Compute attention by its definition, with a block-diagonal mask over all token pairs."""
    query, key, value = projected.unbind(1)
    tokens = torch.arange(len(query), device=query.device)
    sequence = torch.searchsorted(packed.cu_seqlens, tokens, right=True)
    allowed = sequence[:, None] == sequence[None, :]
    if causal:
        allowed = allowed.tril()
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1)
    weights = torch.dropout(weights, dropout, train=True)
    return torch.einsum("hqk,khd->qhd", weights, value)


KERNELS_AND_REFERENCE = {**KERNELS, "reference": reference}
