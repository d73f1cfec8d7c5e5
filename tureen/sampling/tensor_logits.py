"""Logits for processors where torch is installed: tensors that share an array's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def from_array(values: NDArray[np.float32]) -> Tensor:
    """Returns the same memory as a tensor."""
    return torch.from_numpy(values)


def take_over(result: Any, rows: Tensor) -> None:
    """Writes a processor's result into rows. Raises TypeError, ValueError for a result that is none."""
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result)
    if not isinstance(result, Tensor):
        raise TypeError(f"it returned {type(result).__name__}, not a tensor")
    if result.shape != rows.shape:
        raise ValueError(f"it returned the shape {list(result.shape)}, not {list(rows.shape)}")
    if result.data_ptr() != rows.data_ptr() or result.dtype is not torch.float32:
        rows.copy_(result)


def warm_up() -> None:
    """Does once what loads modules or starts threads at its first use."""
    torch.set_num_threads(1)
    logits = torch.zeros(2, 8)
    logits[0, :] = -float("inf")
    logits[0, [1, 2]] = 0.0
    torch.topk(torch.softmax(logits, -1), 2)
    torch.from_numpy(np.zeros(2, dtype=np.float32)).sort()
    logits.masked_fill_(logits > 1, 0.0).scatter_(1, torch.tensor([[0], [1]]), 1.0)
    str(logits), logits.cumsum(-1), logits.argmax(-1).tolist(), torch.where(logits > 0)
    with torch.no_grad():
        (logits * 2).log_softmax(-1)
