"""The arrays that towers compute with, and the operations on them: numpy's with native kernels, or torch's.

A tower is written once, against these interfaces. Besides the operations of `Arrays` it uses what numpy's arrays and
torch's tensors offer under the same names: those of `Array`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray


class Array(Protocol):
    """A numpy array or a torch tensor. A slice or a reshaped array is a view where it can be."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Array]: ...
    def __getitem__(self, key: Any) -> Array: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def __add__(self, other: Any) -> Array: ...
    def __iadd__(self, other: Any) -> Self: ...
    def __sub__(self, other: Any) -> Array: ...
    def __mul__(self, other: Any) -> Array: ...
    def __imul__(self, other: Any) -> Self: ...
    def reshape(self, *shape: int) -> Array: ...
    def swapaxes(self, first: int, second: int) -> Array: ...
    def clip(self, least: float, most: float) -> Array: ...


class Matrix(NamedTuple):
    """The weights [rows, columns] of products, as `Arrays.linear` takes them."""

    held: Any  # a torch tensor, or the kernels' packed matrix
    rows: int
    columns: int

    @property
    def flops(self) -> int:
        """Returns the floating-point operations of a product with one row of inputs."""
        return 2 * self.rows * self.columns


Weights = Mapping[str, Any]
"""The weights of a tower by the names used here: a Matrix where `is_matrix`, else an Array."""


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Returns whether a weight belongs to a product. All but its first dimension are columns: a convolution whose
    strides are its kernel's size is a product with patches."""
    return name.endswith(".weight") and len(shape) > 1


class Arrays(Protocol):
    """Operations on arrays of the type and the device that a tower computes with."""

    def constant(self, values: NDArray[np.float32] | NDArray[np.int64]) -> Array:
        """Returns numbers of the host on the device, in their own type: indices, angles, factors."""

    def narrowed(self, x: Array) -> Array:
        """Returns x in the type that the tower computes with. Sums and products with float32 constants are wider."""

    def widened(self, x: Array) -> Array:
        """Returns x in float32: for sums of large numbers."""

    def empty(self, *shape: int) -> Array:
        """Returns an array whose values are still to be written."""

    def concat(self, parts: Sequence[Array], axis: int = 0) -> Array:
        """Joins arrays along an axis."""

    def matrix(self, values: Array) -> Matrix:
        """Prepares weights [rows, ...] for `linear`."""

    def linear(self, x: Array, matrix: Matrix, bias: Array | None = None) -> Array:
        """Returns x @ matrix.T + bias, [rows of x, rows of the matrix]."""

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """Scales each row of x [rows, columns] to mean 0 and variance 1, then by `weight`."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Scales each row of x [rows, columns] to a mean square of 1, then by `weight`."""

    def activate(self, x: Array, name: str) -> Array:
        """Returns an activation of x [rows, columns], which it may overwrite. name: of ACTIVATIONS."""

    def rotate(self, x: Array, cos: Array, sin: Array) -> None:
        """Rotates pairs of x [tokens, heads, head_dim] in place, computed in float32: a number of a head's first half
        and one of its second. cos, sin: float32 [tokens, head_dim / 2]."""

    def seen(self, keys: Array, values: Array) -> Any:
        """Prepares keys and values [tokens, heads, head_dim] for `attend`."""

    def attend(self, mixed: Array, queries: Array, seen: Any, scale: float) -> None:
        """Writes softmax(queries @ keys.T * scale) @ values of each head to `mixed`; both are [tokens, heads,
        head_dim]."""


class EncoderArrays(Arrays, Protocol):
    """Arrays, and what the encoder needs around them."""

    def numpy(self, x: Array) -> NDArray[np.float32]:
        """Returns an array on the host."""

    def computing(self) -> AbstractContextManager[Any]:
        """Returns a context in which operations are to run; it must not last across a pause."""

    def arithmetic(self) -> dict[str, Any]:
        """Returns what decides the last bit of a number besides its model, settings and code, as plain data."""


ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")
