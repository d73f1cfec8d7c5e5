"""Arrays of torch, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tureen.vision.arrays import Matrix

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # arXiv:1606.08415
    "relu": functional.relu,
    "silu": functional.silu,
}


class TorchArrays:
    """The EncoderArrays of torch."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def constant(self, values: Any) -> Tensor:
        return torch.as_tensor(values, device=self._device)

    def narrowed(self, x: Any) -> Tensor:
        narrow: Tensor = x.to(self._dtype)
        return narrow

    def widened(self, x: Any) -> Tensor:
        wide: Tensor = x.float()
        return wide

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def concat(self, parts: Sequence[Any], axis: int = 0) -> Tensor:
        return torch.cat(list(parts), dim=axis)

    def matrix(self, values: Any) -> Matrix:
        flat = values.flatten(1)
        return Matrix(flat, *flat.shape)

    def linear(self, x: Any, matrix: Matrix, bias: Any = None) -> Tensor:
        return functional.linear(x, matrix.held, bias)

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)

    def activate(self, x: Any, name: str) -> Tensor:
        return ACTIVATIONS[name](x)

    def rotate(self, x: Any, cos: Any, sin: Any) -> None:
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def seen(self, keys: Any, values: Any) -> tuple[Tensor, Tensor]:
        return _by_head(keys), _by_head(values)

    def attend(self, mixed: Any, queries: Any, seen: Any, scale: float) -> None:
        keys, values = seen
        by_head = functional.scaled_dot_product_attention(_by_head(queries), keys, values, scale=scale)
        mixed.copy_(by_head[0].transpose(0, 1))

    def numpy(self, x: Any) -> NDArray[np.float32]:
        array: NDArray[np.float32] = x.float().cpu().numpy()
        return array

    def computing(self) -> torch.inference_mode:
        return torch.inference_mode()

    def arithmetic(self) -> dict[str, Any]:
        is_gpu = self._device.type == "cuda"
        return {
            "backend": f"torch {torch.__version__}",
            "dtype": str(self._dtype),
            "device": torch.cuda.get_device_name() if is_gpu else torch.backends.cpu.get_cpu_capability(),
            "threads": 0 if is_gpu else torch.get_num_threads(),
        }


def _by_head(x: Tensor) -> Tensor:
    """Returns [tokens, heads, head_dim] as [1, heads, tokens, head_dim]."""
    return x.transpose(0, 1)[None]
