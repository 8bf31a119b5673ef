"""Names for tensor shapes, used in signatures and checked by beartype under pytest only.

Legend: tokens = all tokens of a packed batch; sequences = its sequences; width = hidden size;
targets = masked positions that have a loss; vocabulary = vocabulary size.
Outside the tests jaxtyping is not imported, and each name is plain `torch.Tensor`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

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
