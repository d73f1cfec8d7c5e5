"""The last stage before temperature: what the grammar does not allow cannot be drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tureen.grammar.base import Mask


def apply(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask]) -> None:
    """logits[row] = -inf wherever the row's packed mask has no bit; logits [rows, vocab] float32."""
    if not rows:
        return
    vocab_size = logits.shape[1]
    packed = np.stack(masks)
    if logits.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.view(np.uint8), axis=1, count=vocab_size, bitorder="little"))
    else:
        words = torch.from_numpy(packed.view(np.int32)).to(logits.device)
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        bits = (words[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size]
    forbidden = bits == 0
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        for row, unwanted in zip(rows, forbidden, strict=True):
            logits[row].masked_fill_(unwanted, -torch.inf)
