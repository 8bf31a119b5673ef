"""What torch's oneDNN can do on this processor."""

from __future__ import annotations

import torch


def has_products(dtype: torch.dtype = torch.float32) -> bool:
    """Whether there are matrix products with prepared weights, and the processor has them too.

    In bf16 they need AVX512 or AVX-NE-CONVERT.
    """
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
