"""Gated activations: of [tokens, 2 * size], the first half activated times the second (arXiv:2002.05202).

torch computes what is left over where a vector or a thread's share ends with another exp or tanh than the rest, so that
a number's last bits depend on its place. `by_rows` keeps to numbers of rows for which a probe has shown that they do
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from tureen.kernels.rows import SIZES, agreeing_sizes, by_pieces
from tureen.layers.activation_names import SWIGLU_ALPHA, SWIGLU_LIMIT, XIELU

Function = Callable[[Tensor], Tensor]

PROBE_ELEMENTS = 1 << 21  # most of a probe; more rows are computed in pieces
TRIED = 1 << 16  # numbers among which those are sought that show the difference


def silu_and_mul(x: Tensor) -> Tensor:
    """Computes silu(gate) * up of x [tokens, 2 * size], whose halves are gate and up: [tokens, size]."""
    return by_rows(_silu_and_mul, x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Computes gelu(gate) * up, gelu by its tanh approximation, of x [tokens, 2 * size]: [tokens, size]."""
    return by_rows(_gelu_tanh_and_mul, x)


def relu_squared_and_mul(x: Tensor) -> Tensor:
    """Computes relu(gate)² * up of x [tokens, 2 * size], whose halves are gate and up: [tokens, size]."""
    gate, up = x.chunk(2, dim=-1)
    return relu_squared(gate).mul_(up)


def clamped_swiglu(x: Tensor) -> Tensor:
    """Computes gate * sigmoid(1.702 * gate) * (up + 1) of x [tokens, 2 * size], whose halves are gate and up, the gate
    at most 7, up between -7 and 7 (gpt-oss, arXiv:2508.10925): [tokens, size]."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate.mul(sigmoid(gate * SWIGLU_ALPHA)).mul_(up.add_(1))


def gelu_tanh(x: Tensor) -> Tensor:
    """Computes gelu by its tanh approximation (arXiv:1606.08415)."""
    return by_rows(_gelu_tanh, x)


def relu_squared(x: Tensor) -> Tensor:
    """Computes relu(x)² (arXiv:2109.08668)."""
    return functional.relu(x).square_()


def silu(x: Tensor) -> Tensor:
    return by_rows(functional.silu, x)


class Xielu:
    """The activation xIELU (arXiv:2411.13010), whose parameters are weights."""

    def __init__(self) -> None:
        self._parameters = {name: torch.empty(1, dtype=torch.float32) for name in XIELU}

    def __call__(self, x: Tensor) -> Tensor:
        positive, negative, slope, most = self._parameters.values()
        wide = x.float()
        bent = by_rows(torch.expm1, torch.minimum(wide, most)) - wide
        curved = torch.where(
            wide > 0, functional.softplus(positive) * wide * wide, bent * (slope + functional.softplus(negative))
        )
        return (curved + slope * wide).to(x.dtype)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._parameters.items():
            yield f"{prefix}.{name}", tensor


GATED: dict[str, Function] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
    "relu2": relu_squared_and_mul,
    "clamped_swiglu": clamped_swiglu,
}
"""Gated activations by the name in a model's config."""
PLAIN: dict[str, Function] = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh, "relu2": relu_squared}
"""Activations without a gate, likewise."""


def sigmoid(x: Tensor) -> Tensor:
    return by_rows(torch.sigmoid, x)


def tanh(x: Tensor) -> Tensor:
    return by_rows(torch.tanh, x)


def by_rows(function: Function, x: Tensor) -> Tensor:
    """Computes function(x) for x [rows, size]; on a CPU a row's bits do not depend on the others. See
    kernels/rows.py."""
    if x.device.type != "cpu":
        return function(x)
    return by_pieces(function, x.contiguous(), _sizes(function, x.shape[1], x.dtype, torch.get_num_threads()))


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _gelu_tanh_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


@lru_cache(maxsize=1024)
def _sizes(function: Function, size: int, dtype: torch.dtype, threads: int) -> tuple[int, ...]:
    """Probes numbers of rows; see rows.py. `threads`: the number that torch uses now; rows that they can share evenly
    are tried too."""
    with torch.inference_mode():
        tried = sorted({*SIZES, *(threads * rows for rows in SIZES if threads * rows <= SIZES[-1])})
        least = [rows for rows in tried if rows * size <= PROBE_ELEMENTS] or [1]
        return agreeing_sizes(function, _telling_rows(function, size, dtype), least)


def _telling_rows(function: Function, size: int, dtype: torch.dtype) -> Tensor:
    """Returns [3, size] of numbers whose results differ alone and in a vector, if there are any such numbers."""
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(TRIED, generator=generator).mul_(4).to(dtype)
    ones = torch.ones_like(numbers)
    is_gated = function in (_silu_and_mul, _gelu_tanh_and_mul)
    in_vectors = function(torch.cat((numbers, ones))[None] if is_gated else numbers[None])[0, :TRIED]
    apart = torch.stack((numbers, ones), 1)  # numbers that do not stand side by side are computed one by one
    alone = function(apart if is_gated else apart[:, :1])[:, 0]
    telling = numbers[in_vectors != alone]
    telling = telling if len(telling) else numbers
    rows = telling[torch.randint(len(telling), (3, size), generator=generator)]
    if is_gated:
        rows[:, size // 2 :] = 1
    return rows
