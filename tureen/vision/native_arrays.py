"""Arrays of numpy in float32, on a CPU: the native kernels compute whatever takes time. No torch.

Matrices and their inputs may be integers of 16 bits (format Q16 of matrix.h).

No number depends on the number of threads, nor on how rows are divided into pieces: the kernels see to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tureen.vision.arrays import Matrix


class NativeArrays:
    """The EncoderArrays of numpy and the native kernels. Arrays are float32, or int64 if they are indices."""

    def __init__(self, kernels: ModuleType, num_threads: int, dtype: str) -> None:
        """dtype: of matrices, int16 or float32."""
        self._kernels = kernels
        self._dtype = dtype
        self._format = "Q16" if dtype == "int16" else "F32"
        self._pool = kernels.Pool(num_threads, False)

    def constant(self, values: Any) -> Any:
        return values

    def narrowed(self, x: Any) -> Any:
        return x

    def widened(self, x: Any) -> Any:
        return x

    def empty(self, *shape: int) -> Any:
        return np.empty(shape, np.float32)

    def concat(self, parts: Sequence[Any], axis: int = 0) -> Any:
        return np.concatenate(parts, axis=axis)

    def matrix(self, values: Any) -> Matrix:
        flat = np.ascontiguousarray(values).reshape(len(values), -1)
        rows, columns = flat.shape
        stored = flat.reshape(-1).view(np.uint8)
        return Matrix(self._kernels.Matrix.pack(self._pool, stored, "F32", self._format, rows, columns), rows, columns)

    def linear(self, x: Any, matrix: Matrix, bias: Any = None) -> Any:
        return self._kernels.linear(self._pool, np.ascontiguousarray(x), matrix.held, bias)

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return self._kernels.layer_norm(self._pool, np.ascontiguousarray(x), weight, bias, eps)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return self._kernels.rms_norm(self._pool, np.ascontiguousarray(x), weight, eps)

    def activate(self, x: Any, name: str) -> Any:
        activated = np.ascontiguousarray(x)
        if name == "relu":
            np.maximum(activated, np.float32(0), out=activated)
        else:
            self._kernels.activate(self._pool, activated, name)
        return activated

    def rotate(self, x: Any, cos: Any, sin: Any) -> None:
        self._kernels.rotate_heads(self._pool, x, cos, sin)

    def seen(self, keys: Any, values: Any) -> Any:
        return self._kernels.SeenTokens(self._pool, keys, values)

    def attend(self, mixed: Any, queries: Any, seen: Any, scale: float) -> None:
        self._kernels.attend_all(self._pool, queries, seen, mixed, scale)

    def numpy(self, x: Any) -> NDArray[np.float32]:
        array: NDArray[np.float32] = x
        return array

    def computing(self) -> nullcontext[None]:
        return nullcontext()

    def arithmetic(self) -> dict[str, Any]:
        return {"backend": "native", "isa": self._kernels.isa(), "dtype": self._dtype, "numpy": np.__version__}
