"""Checkpoints in MXFP4: the experts of gpt-oss.

The matrices X of all experts are `X_blocks` [experts, rows, groups, 16 bytes] and `X_scales` [experts, rows, groups]. A
byte holds two neighbouring values, the first in its low half; a scale is the exponent of a power of two plus 127.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tureen.weights.gguf_quants import MXFP4
from tureen.weights.modules import Module
from tureen.weights.stored import Stored

METHODS = ("mxfp4",)
BLOCKS: Final = "_blocks"
GROUP: Final = 32
Bytes = NDArray[np.uint8]


def reader(settings: Mapping[str, Any]) -> Callable[[Module], Stored | None]:
    """Returns a function that makes the next weight of a module from its tensors, and None if there is none left.

    Raises StartupError naming a tensor that is missing or misshapen.
    """
    return _weight


def _weight(module: Module) -> Stored | None:
    name = next((part.removesuffix(BLOCKS) for part in module.parts if part.endswith(BLOCKS)), None)
    if name is None:
        return None
    file, info = module.parts[name + BLOCKS]
    if len(info.shape) != 4 or info.shape[3] != GROUP // 2:
        expected = f"[experts, rows, groups, {GROUP // 2}]"
        raise module.fault(name + BLOCKS, f"has shape {list(info.shape)}, not {expected}", file.path)
    experts, rows, groups = info.shape[:3]
    blocks = module.take(name + BLOCKS, ("U8",), info.shape)
    scales = module.take(f"{name}_scales", ("U8",), info.shape[:3])
    shape = (experts, rows, groups * GROUP)
    return Stored(f"{module.name}.{name}.weight", shape, "MXFP4", lambda: _encoded(blocks, scales))


def _encoded(blocks: Bytes, scales: Bytes) -> Bytes:
    """Returns blocks of GGUF, whose bytes hold a value of the first half and one of the second."""
    encoded = np.empty(scales.shape, MXFP4)
    encoded["e"] = scales
    for expert, stored in enumerate(blocks):
        values = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:2], 2, GROUP // 2)
        encoded["qs"][expert] = values[:, :, 0] | values[:, :, 1] << 4
    return encoded.reshape(-1).view(np.uint8)
