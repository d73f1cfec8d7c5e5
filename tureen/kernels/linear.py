"""Matrix products with weights in the layout that the device reads fastest; on a CPU a row's bits depend on it alone.

On a CPU with oneDNN the weights are laid out in blocks once, at load: a third less time at small batches than
`torch.nn.functional.linear`. For either product a probe finds which numbers of rows give a row the same bits: see
`rows.py`. The probe's inputs cancel exactly, so that nothing is left of a sum but its rounding.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from tureen.devices.dtypes import has_onednn, has_onednn_bfloat16
from tureen.kernels.rows import SIZES, SMALL, agreeing_sizes, by_pieces

ROWS_HINT = 16  # oneDNN chooses the layout for about this many rows
PROBE_WORK = 1 << 29  # multiplications of the largest product of a probe; more rows are computed in pieces
PROBE_WEIGHTS = 1 << 22  # a matrix of more is probed with the same weights for all outputs: they are made sooner


def can_pack(weight: Tensor) -> bool:
    """Says whether `pack` lays this weight out in blocks."""
    if weight.device.type != "cpu":
        return False
    return (weight.dtype == torch.float32 and has_onednn()) or (
        weight.dtype == torch.bfloat16 and has_onednn_bfloat16()
    )


def pack(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Lays a weight [out, in] out for `linear`. The result may be opaque, of the same size, or the tensor itself.

    The products that will be made with it are probed.
    """
    if weight.device.type == "cpu":
        _sizes(weight.shape[1], weight.shape[0], weight.dtype, can_pack(weight), bias is not None, _threads())
    return _packed(weight) if can_pack(weight) else weight


def unpack(weight: Tensor) -> Tensor:
    """Returns the tensor that was packed: a copy, or the tensor itself."""
    return weight.to_dense() if weight.is_mkldnn else weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x [rows, in] @ weight.T + bias: [rows, out]. `weight` comes from `pack`."""
    if weight.device.type != "cpu":
        return functional.linear(x, weight, bias)
    outputs, inputs = weight.shape
    sizes = _sizes(inputs, outputs, weight.dtype, weight.is_mkldnn, bias is not None, _threads())
    return by_pieces(lambda rows: _multiply(rows, weight, bias), x.contiguous(), sizes)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def _threads() -> int:
    return torch.get_num_threads()


@lru_cache(maxsize=1024)
def _sizes(
    inputs: int, outputs: int, dtype: torch.dtype, is_packed: bool, has_bias: bool, threads: int
) -> tuple[int, ...]:
    """Probes numbers of rows; see rows.py. `threads`: the number that torch uses now."""
    with torch.inference_mode():
        rows, weight = _cancelling(inputs, outputs, dtype)
        weight = _packed(weight) if is_packed else weight.contiguous()
        bias = torch.zeros(outputs, dtype=dtype) if has_bias else None
        most = max(SMALL, PROBE_WORK // max(1, inputs * outputs))
        sizes = [size for size in SIZES if size <= most]
        return agreeing_sizes(lambda some: _multiply(some, weight, bias), rows, sizes)


def _cancelling(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns rows [3, in] and weights [out, in]; of their products' exact sum nothing is left."""
    generator = torch.Generator().manual_seed(inputs)
    half = inputs // 2
    order = torch.randperm(half, generator=generator)
    x, weight = (torch.randn(count, half, generator=generator).to(dtype) for count in (3, 16))
    end = torch.zeros(3, inputs % 2, dtype=dtype)
    rows = torch.cat((x, x[:, order], end), 1)
    weights = torch.cat((weight, -weight[:, order], torch.zeros(16, inputs % 2, dtype=dtype)), 1)
    if inputs * outputs > PROBE_WEIGHTS:
        return rows, weights[:1].expand(outputs, -1)
    return rows, weights.repeat(-(-outputs // 16), 1)[:outputs]
