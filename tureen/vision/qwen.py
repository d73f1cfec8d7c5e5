"""The vision transformer of Qwen's models: turns pictures of any resolution into embeddings of the language model.

Patches are ordered token by token: the patches of one token are adjacent, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tureen.errors import RequestFailed
from tureen.media.qwen_vision import QwenVision
from tureen.vision.picture_embedder import Work
from tureen.vision.tower import ACTIVATIONS, MIN_ROWS, attend, blocks, rotated

EPS = 1e-6


class Grid(NamedTuple):
    """The places of a picture's patches, as layers need them."""

    cos: Tensor  # [patches, 1, head size], of the angles that turn queries and keys
    sin: Tensor
    windows: list[slice]  # patches that see each other in layers with windows; empty: all layers see all


class QwenEmbedder:
    """The PictureEmbedder of Qwen's models. weights: those of `QwenVision.weights`; piece: see Tower."""

    def __init__(self, config: QwenVision, weights: Mapping[str, Tensor], piece: int) -> None:
        self._config = config
        self._weights = weights
        self._piece = piece
        self._activate = ACTIVATIONS[config.activation]

    def embed(self, pictures: Tensor, layout: tuple[int, ...]) -> Work:
        """Embeds one picture [1, 3, height, width], normalised: returns [tokens, hidden_size], with deep layers
        [tokens, (1 + deep layers) * hidden_size]. Yields as Tower does."""
        config = self._config
        count, _, height, width = pictures.shape
        if layout or count != 1 or height % config.token_side or width % config.token_side:
            raise RequestFailed(f"the model does not take {count} tiles of {height} x {width} pixels laid out so")
        tokens = torch.arange(height * width // config.token_side**2).view(height // config.token_side, -1)
        order, sizes = _in_windows(tokens, config.window)
        hidden = yield from self._embed_patches(pictures[0], order)
        grid = self._grid(height // config.patch_size, width // config.patch_size, order, sizes)
        merged = []
        for layer in range(config.num_layers):
            is_full = not grid.windows or layer in config.full_layers
            yield from self._run_layer(hidden, f"layers.{layer}", grid, [slice(None)] if is_full else grid.windows)
            if layer in config.deep_layers:
                index = config.deep_layers.index(layer)
                merged.append((yield from self._merge(hidden, f"deep.{index}", is_merged_first=True)))
        merged.insert(0, (yield from self._merge(hidden, "merger", is_merged_first=False)))
        return torch.cat(merged, dim=-1)[order.argsort().to(hidden.device)]

    def _by_token(self, patches: Tensor, order: Tensor) -> Tensor:
        """Orders values of patches [rows, columns, ...] token by token: returns [patches, ...]."""
        merge = self._config.merge
        rows, columns, *rest = patches.shape
        tokens = patches.reshape(rows // merge, merge, columns // merge, merge, *rest).transpose(1, 2)
        return tokens.reshape(-1, merge**2, *rest)[order.to(patches.device)].reshape(-1, *rest)

    def _embed_patches(self, pixels: Tensor, order: Tensor) -> Work:
        patch, frames = self._config.patch_size, self._config.num_frames
        kernel, bias = self._weights["patches.weight"].flatten(1), self._weights.get("patches.bias")
        cut = pixels.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4)
        inputs = self._by_token(cut, order)[:, :, None].expand(-1, -1, frames, -1, -1).flatten(1)
        hidden = inputs.new_empty(len(inputs), len(kernel))
        for rows in blocks(len(inputs), 2 * kernel.numel(), self._piece, MIN_ROWS):
            hidden[rows] = functional.linear(inputs[rows], kernel, bias)
            yield 2 * len(hidden[rows]) * kernel.numel()
        if self._config.table_side:
            side, grid = self._config.table_side, (cut.shape[0], cut.shape[1])
            table = self._weights["positions.weight"].float().T.reshape(1, -1, side, side)
            stretched = functional.interpolate(table, grid, mode="bilinear", align_corners=True)
            hidden += self._by_token(stretched[0].permute(1, 2, 0), order).to(hidden.dtype)
        return hidden

    def _grid(self, rows: int, columns: int, order: Tensor, sizes: list[int]) -> Grid:
        config = self._config
        quarter = config.hidden_size // config.num_heads // 4
        exponents = torch.arange(0, 2 * quarter, 2, dtype=torch.float32) / (2 * quarter)
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
        angles = self._by_token(places, order)[..., None].float() / config.theta**exponents
        angles = angles.flatten(1).repeat(1, 2)[:, None].to(self._weights["patches.weight"].device)
        ends = [count * config.merge**2 for count in accumulate(sizes, initial=0)]
        windows = [slice(start, end) for start, end in pairwise(ends)]
        return Grid(angles.cos(), angles.sin(), windows if config.window else [])

    def _run_layer(self, hidden: Tensor, name: str, grid: Grid, spans: list[slice]) -> Iterator[int]:
        """Adds to `hidden` in place. spans: patches that see each other."""
        mixed = yield from self._attend(hidden, name, grid, spans)
        parts = ("out", "gate", "up", "down") if self._config.has_gates else ("out", "up", "down")
        row_flops = 2 * sum(self._weights[f"{name}.{part}.weight"].numel() for part in parts)
        for rows in blocks(len(hidden), row_flops, self._piece, MIN_ROWS):
            part = hidden[rows]
            part += self._linear(mixed[rows], f"{name}.out")
            normed = self._norm(part, f"{name}.norm2")
            inner = self._linear(normed, f"{name}.up")
            if self._config.has_gates:
                inner *= self._activate(self._linear(normed, f"{name}.gate"))
            else:
                inner = self._activate(inner)
            part += self._linear(inner, f"{name}.down")
            yield len(part) * row_flops

    def _attend(self, hidden: Tensor, name: str, grid: Grid, spans: list[slice]) -> Work:
        """Returns [patches, hidden_size], the heads side by side."""
        size, width = hidden.shape
        num_heads = self._config.num_heads
        projected = hidden.new_empty(3, size, num_heads, width // num_heads)
        row_flops = 6 * width * width
        for rows in blocks(size, row_flops, self._piece, MIN_ROWS):
            normed = self._norm(hidden[rows], f"{name}.norm1")
            qkv = self._linear(normed, f"{name}.qkv").view(len(normed), 3, num_heads, -1).transpose(0, 1)
            projected[:2, rows] = rotated(qkv[:2], grid.cos[rows], grid.sin[rows])
            projected[2, rows] = qkv[2]
            yield len(normed) * row_flops
        mixed = torch.empty_like(hidden)
        heads = mixed.view(size, num_heads, -1).transpose(0, 1)
        for span in spans:
            q, k, v = projected[:, span].transpose(1, 2)
            yield from attend(heads[:, span], q, k, v, self._piece)
        return mixed

    def _merge(self, hidden: Tensor, name: str, *, is_merged_first: bool) -> Work:
        """Merges the patches of each token: returns [tokens, hidden_size of the language model].

        is_merged_first: the norm is of the joined patches, not of each.
        """
        wide = hidden.view(-1, hidden.shape[1] * self._config.merge**2)
        first, second = self._weights[f"{name}.fc1.weight"], self._weights[f"{name}.fc2.weight"]
        merged = hidden.new_empty(len(wide), len(second))
        row_flops = 2 * (first.numel() + second.numel())
        for rows in blocks(len(wide), row_flops, self._piece, MIN_ROWS):
            part = wide[rows] if is_merged_first else wide[rows].view(-1, hidden.shape[1])
            normed = self._norm(part, f"{name}.norm").reshape(-1, wide.shape[1])
            inner = functional.gelu(self._linear(normed, f"{name}.fc1"))
            merged[rows] = self._linear(inner, f"{name}.fc2")
            yield len(merged[rows]) * row_flops
        return merged

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        if self._config.has_gates:
            return functional.rms_norm(x, (x.shape[-1],), weight, EPS)
        return functional.layer_norm(x, (x.shape[-1],), weight, self._weights[f"{name}.bias"], EPS)


def make(vision: QwenVision, weights: Mapping[str, Tensor], piece: int) -> QwenEmbedder:
    """Makes the PictureEmbedder of a Qwen."""
    return QwenEmbedder(vision, weights, piece)


def _in_windows(tokens: Tensor, side: int) -> tuple[Tensor, list[int]]:
    """Returns the numbers of tokens [rows, columns] window by window, and how many each window has. side: of a window,
    in tokens; 0: all tokens are one window."""
    if not side:
        return tokens.flatten(), [tokens.numel()]
    windows = [part.flatten() for rows in torch.split(tokens, side) for part in torch.split(rows, side, dim=1)]
    return torch.cat(windows), [len(window) for window in windows]
