"""Token embedding and the head that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tureen.kernels import linear as kernel
from tureen.layers.activation import tanh


class Embedding:
    """Turns token ids into vectors, times `scale` if given (rounded to the embedding's dtype first)."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, scale: float | None = None) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype)
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()

    def __call__(self, token_ids: Tensor) -> Tensor:
        vectors = functional.embedding(token_ids, self.weight)
        return vectors if self._scale is None else vectors * self._scale

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self.weight


class Head:
    """Turns hidden states into logits in float32, times `scale`; a softcap of c makes c * tanh(logit / c) of them.

    `tied`: the embedding whose weights it shares.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        tied: Embedding | None,
        bias: bool,
        scale: float,
        softcap: float | None,
    ) -> None:
        self._tied = tied
        self._scale = scale
        self._softcap = softcap
        self.weight = torch.empty(0 if tied else vocab_size, hidden_size, dtype=dtype)
        self.bias = torch.empty(vocab_size, dtype=dtype) if bias else None

    def __call__(self, hidden: Tensor) -> Tensor:
        return scaled_logits(kernel.linear(hidden, self.weight, self.bias).float(), self._scale, self._softcap)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        if self._tied is None:
            yield f"{name}.weight", kernel.unpack(self.weight)
        if self.bias is not None:
            yield f"{name}.bias", self.bias

    def finish(self) -> None:
        self.weight = kernel.pack(self.weight if self._tied is None else self._tied.weight, self.bias)


def scaled_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns logits times `scale`, and c * tanh(logit / c) of them for a softcap of c; they are changed in place."""
    if scale != 1.0:
        logits = logits.mul_(scale)
    return logits if softcap is None else tanh(logits.div_(softcap)).mul_(softcap)
