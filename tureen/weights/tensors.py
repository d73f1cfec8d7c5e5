"""Converts stored weights to torch tensors."""

from __future__ import annotations

from typing import Final

import torch

from tureen.weights.stored import Stored, in_order, to_float32

DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def as_tensor(stored: Stored) -> torch.Tensor:
    """Returns a copy of the stored type; float32 if that is a block format or a number is added to the values."""
    dtype = DTYPES.get(stored.encoding)
    if dtype is None or stored.offset:
        return torch.from_numpy(to_float32(stored))
    return torch.from_numpy(in_order(stored).copy()).view(dtype).reshape(stored.shape)
