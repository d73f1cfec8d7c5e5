"""Matrix products with weights in the layout that the device reads fastest.

On a CPU with oneDNN the weights are laid out in blocks once, at load: a third less time at small batches, the same
bits as `torch.nn.functional.linear`. There the result of a row does not depend on how many rows are computed with it:
measured on AVX-512, in bfloat16 for every number of rows, in float32 for multiples of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tureen.devices.cpu import has_fast_bfloat16, has_onednn

FLOAT32_ROWS = 16  # float32 inputs are padded to a multiple of this, so that a row's result is always the same


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    return (weight.dtype == torch.float32 and has_onednn()) or (weight.dtype == torch.bfloat16 and has_fast_bfloat16())


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> the same weights for `linear`; may be opaque, of the same size, or the tensor itself."""
    if not can_pack(weight):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, FLOAT32_ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight.T + bias -> [rows, out]; `weight` comes from `pack`."""
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    rows = x.shape[0]
    if x.dtype == torch.float32 and rows % FLOAT32_ROWS:
        x = functional.pad(x, (0, 0, 0, -rows % FLOAT32_ROWS))
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result[:rows]
