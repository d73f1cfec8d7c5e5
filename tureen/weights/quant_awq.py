"""Checkpoints quantised with AWQ (arXiv:2306.00978), as AutoAWQ writes them in its format GEMM.

A matrix of [outputs, inputs] is stored as
    qweight  int32 [inputs, outputs / 8]: a word holds 8 consecutive outputs of one input, in ORDER from the lowest bits
    qzeros   int32 [groups, outputs / 8]: likewise
    scales   [groups, outputs]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tureen.weights import quantised
from tureen.weights.modules import FLOATS, Module, to_floats
from tureen.weights.quantised import Bytes, Grouped
from tureen.weights.stored import Stored

METHODS = ("awq",)
PARTS = ("qweight", "qzeros", "scales")
ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
FIELDS: Final = len(ORDER)


def reader(settings: Mapping[str, Any]) -> Callable[[Module], Stored | None]:
    """Returns a function that makes a module's weight from its tensors, and None for a module that is not quantised.

    Raises StartupError naming the setting that is not supported, or a tensor that is missing or misshapen.
    """
    quantised.setting(settings, "bits", 4)
    quantised.setting(settings, "zero_point", True, default=True)
    name = "version" if settings.get("version") is not None else "format"
    quantised.setting(settings, name, "gemm", "GEMM", default="gemm")
    quantised.setting(settings, "backend", "autoawq", "auto", default="auto")
    size = quantised.length(settings, "group_size")
    return lambda module: _weight(module, size)


def _weight(module: Module, size: int | None) -> Stored | None:
    if not any(part in module.parts for part in PARTS):
        return None
    words = module.take("qweight", ("I32",))
    cols, rows = words.shape[0], words.shape[1] * FIELDS
    size = min(size or cols, cols)
    num_groups = -(-cols // size)
    zeros = module.take("qzeros", ("I32",), (num_groups, rows // FIELDS))
    scales = module.take("scales", FLOATS, (num_groups, rows))
    group_of = None if cols % size == 0 else np.arange(cols) // size

    def integers(begin: int, end: int) -> Bytes:
        return _unpack(words[:, begin // FIELDS : end // FIELDS])

    def read() -> Grouped:
        return Grouped(4, integers, to_floats(scales).T, _unpack(zeros).astype(np.int16), group_of)

    return quantised.from_groups(module, (rows, cols), read)


def _unpack(words: NDArray[np.uint32]) -> Bytes:
    """Unpacks words [n, k] to [8 * k, n]."""
    by_output = np.ascontiguousarray(words.T)
    values = np.empty((words.shape[1], FIELDS, words.shape[0]), np.uint8)
    for high in range(2):
        nibbles = (by_output >> 4 * high & 0x0F0F0F0F).view(np.uint8).reshape(*by_output.shape, 4)
        for byte in range(4):
            values[:, ORDER[2 * byte + high]] = nibbles[..., byte]
    return values.reshape(-1, words.shape[0])
