"""Computes a vision transformer's hidden states, piece by piece: CLIP, SigLIP, DINOv2 and Pixtral differ in a few
flags.

A piece is some rows of a product, or some heads and queries; the generators yield the floating-point operations of each
piece after it is done. How a picture is divided depends on the model and `piece` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from tureen.media.vision_config import TowerConfig
from tureen.vision.picture_embedder import Work

Turns = tuple[Tensor, Tensor]
MIN_ROWS: Final = 256  # of a product: fewer spend their time on reading the matrix
ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # arXiv:1606.08415
    "relu": functional.relu,
    "silu": functional.silu,
}


class Tower:
    """A vision transformer (arXiv:2010.11929).

    weights: those of `TowerConfig.weights`; piece: floating-point operations that may be done at once, about.
    """

    def __init__(self, config: TowerConfig, weights: Mapping[str, Tensor], piece: int) -> None:
        self.config = config
        self._weights = weights
        self._piece = piece
        self._activate = ACTIVATIONS[config.activation]

    def states(self, pixels: Tensor, layers: tuple[int, ...]) -> Work:
        """Returns the outputs of these layers, side by side, for pixels [3, height, width], normalised: [tokens,
        hidden_size * len(layers)]. Layer 0 is the input of the first. Yields the operations of each piece."""
        hidden = yield from self._embed(pixels)
        turns = self._turns(pixels)
        features = {0: hidden.clone()} if 0 in layers else {}
        for layer in range(self.config.num_layers):
            yield from self._run_layer(hidden, f"layers.{layer}", turns)
            if layer + 1 in layers:
                features[layer + 1] = hidden.clone()
        return torch.cat([features[layer] for layer in layers], dim=-1)

    def _embed(self, pixels: Tensor) -> Work:
        config, weights = self.config, self._weights
        kernel, bias = weights["patches.weight"], weights.get("patches.bias")
        patches = functional.conv2d(pixels[None], kernel, bias, stride=config.patch_size)[0]
        hidden = patches.flatten(1).T
        if config.has_class_token:
            hidden = torch.cat([weights["class_token"][None], hidden])
        if config.rope_theta is None:
            hidden = hidden + self._positions(pixels.shape[1], pixels.shape[2])
        if config.has_input_norm:
            hidden = self._norm(hidden, "input_norm")
        yield 2 * len(hidden) * kernel.numel()
        return hidden.contiguous()

    def _positions(self, height: int, width: int) -> Tensor:
        positions, size = self._weights["positions"], self.config.image_size
        if height == width and self.config.num_patches(height, width) == self.config.num_patches(size, size):
            return positions
        first = int(self.config.has_class_token)
        side, patch = size // self.config.patch_size, self.config.patch_size
        square = positions[first:].float().T.reshape(1, -1, side, side)
        stretched = functional.interpolate(square, (height // patch, width // patch), mode="bicubic")
        return torch.cat([positions[:first], stretched[0].flatten(1).T.to(positions.dtype)])

    def _turns(self, pixels: Tensor) -> Turns | None:
        """Returns the cosines and sines, [tokens, head_dim] each, of the angles by which positions rotate; a pair is a
        number of a head's first half and one of its second."""
        config = self.config
        if config.rope_theta is None:
            return None
        rows, columns = pixels.shape[1] // config.patch_size, pixels.shape[2] // config.patch_size
        size = config.hidden_size // config.num_heads
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=pixels.device) / size
        frequencies = 1 / config.rope_theta**steps
        places = torch.arange(max(rows, columns), dtype=torch.float32, device=pixels.device)[:, None]
        down, across = places[:rows] * frequencies[0::2], places[:columns] * frequencies[1::2]
        grid = (rows, columns, size // 4)
        half = torch.cat([down[:, None].expand(grid), across[None].expand(grid)], dim=-1).reshape(rows * columns, -1)
        angles = half.repeat(1, 2)
        return angles.cos(), angles.sin()

    def _run_layer(self, hidden: Tensor, name: str, turns: Turns | None) -> Iterator[int]:
        """Adds to `hidden` in place."""
        size, config = len(hidden), self.config
        mixed = yield from self._attend(hidden, name, turns)
        names = ("out", "fc1", "fc2", "gate") if config.has_gate else ("out", "fc1", "fc2")
        row_flops = 2 * sum(self._weights[f"{name}.{part}.weight"].numel() for part in names)
        for rows in blocks(size, row_flops, self._piece, MIN_ROWS):
            part = hidden[rows]
            part += self._scaled(self._linear(mixed[rows], f"{name}.out"), f"{name}.scale1")
            inner = self._inner(self._norm(part, f"{name}.norm2"), name)
            part += self._scaled(self._linear(inner, f"{name}.fc2"), f"{name}.scale2")
            yield len(part) * row_flops

    def _inner(self, normed: Tensor, name: str) -> Tensor:
        """Returns the mlp's inner values."""
        inner = self._linear(normed, f"{name}.fc1")
        if self.config.has_gate:
            return self._activate(self._linear(normed, f"{name}.gate")) * inner
        if self.config.has_gated_mlp:
            gate, up = inner.chunk(2, dim=-1)
            return self._activate(gate) * up
        return self._activate(inner)

    def _attend(self, hidden: Tensor, name: str, turns: Turns | None) -> Work:
        """Attends, every token to every other: returns [tokens, hidden_size], the heads side by side."""
        size, width = hidden.shape
        num_heads = self.config.num_heads
        projected = [torch.empty_like(hidden) for _ in "qkv"]
        row_flops = 6 * width * width
        for rows in blocks(size, row_flops, self._piece, MIN_ROWS):
            normed = self._norm(hidden[rows], f"{name}.norm1")
            for out, part in zip(projected, "qkv", strict=True):
                out[rows] = self._linear(normed, f"{name}.{part}")
                if turns is not None and part != "v":
                    heads = out[rows].view(len(normed), num_heads, -1)
                    heads.copy_(rotated(heads, *(turn[rows, None] for turn in turns)))
            yield len(normed) * row_flops
        q, k, v = (tensor.view(size, num_heads, -1).transpose(0, 1) for tensor in projected)
        mixed = torch.empty_like(hidden)
        heads = mixed.view(size, num_heads, -1).transpose(0, 1)
        yield from attend(heads, q, k, v, self._piece)
        return mixed

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        if self.config.has_rms_norms:
            return functional.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, self.config.norm_eps)

    def _scaled(self, x: Tensor, name: str) -> Tensor:
        return x * self._weights[name] if self.config.has_layer_scales else x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [..., head_dim] with pairs rotated, computed in float32: a number of the first half and one of the
    second. cos, sin: float32, of the angles of all numbers."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def attend(mixed: Tensor, q: Tensor, k: Tensor, v: Tensor, piece: int) -> Iterator[int]:
    """Writes to `mixed` what each query gets of all keys; all are [heads, tokens, head_dim]. Yields as Tower does.

    A head that is more than a piece is divided by queries.
    """
    num_heads, size, width = q.shape
    query_flops = 4 * size * width
    for group in blocks(num_heads, query_flops * size, piece, 1):
        group_flops = len(q[group]) * query_flops
        for rows in blocks(size, group_flops, piece, MIN_ROWS):
            mixed_rows = functional.scaled_dot_product_attention(q[None, group, rows], k[None, group], v[None, group])[
                0
            ]
            mixed[group, rows] = mixed_rows
            yield mixed_rows.shape[1] * group_flops


def blocks(count: int, flops: int, piece: int, least: int) -> Iterator[slice]:
    """Yields `count` rows of `flops` operations each, in blocks of about a piece, but of no fewer rows than `least`."""
    rows = max(least, piece // max(1, flops))
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))
