"""The last stage before temperature: what the grammar does not allow cannot be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tureen.grammar import Mask


def apply(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask]) -> None:
    """Sets logits[row] to -inf wherever the row's packed mask has no bit; logits are float32 [rows, vocabulary].

    Each byte of a mask is looked up as the eight numbers to be added. A logit that is not finite may become NaN.
    """
    if not rows:
        return
    packed = torch.from_numpy(np.stack(masks).view(np.uint8)).to(logits.device).int()
    added = torch.nn.functional.embedding(packed, _eight_tokens(logits.device)).flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.add_(added)
    else:
        logits.index_add_(0, torch.tensor(rows, device=logits.device), added)


@cache
def _eight_tokens(device: torch.device) -> Tensor:
    """Returns [256, 8] float32: for each byte 0 where it has a bit, least first, and -inf where it has none."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, 0.0, -np.inf).astype(np.float32)).to(device)
