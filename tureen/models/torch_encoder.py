"""An encoder in torch: turns the tokens of one text into their states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tureen.layers.rope import RopeConfig, frequencies
from tureen.models.encoder import EncoderConfig
from tureen.models.relative import buckets

QUERIES = 1024
"""Tokens whose scores are computed together: a score takes 4 bytes for each head and each token that is seen."""


class TorchEncoder:
    """The encoder that an EncoderConfig describes.

    weights: those of `EncoderConfig.weights`, on the device and in the type that is computed in.
    """

    def __init__(self, config: EncoderConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = weights

    def states(self, token_ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        """Returns the last layer's output, [tokens, hidden_size], for token ids, rows of the table of positions, and
        token types, each [tokens]."""
        config, weights = self._config, self._weights
        hidden = weights["embed_tokens.weight"][token_ids]
        if config.embedding_scale is not None:
            hidden = hidden * torch.tensor(config.embedding_scale, dtype=hidden.dtype)
        if config.num_token_types:
            hidden = hidden + weights["embed_types.weight"][types]
        if config.num_positions:
            hidden = hidden + weights["embed_positions.weight"][positions]
        hidden = self._norm(hidden, "embed_norm")
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            mixed = self._attend(self._norm(hidden, f"{name}.input_layernorm"), layer)
            hidden = self._sum(hidden, mixed, f"{name}.post_attention_layernorm")
            inner = self._mlp(self._norm(hidden, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
            hidden = self._sum(hidden, inner, f"{name}.post_feedforward_layernorm")
        return self._norm(hidden, "norm")

    def _sum(self, hidden: Tensor, added: Tensor, norm: str) -> Tensor:
        if self._config.norms_follow_sum:
            return self._norm(hidden + added, norm)
        return hidden + self._norm(added, norm)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        up = self._linear(x, f"{name}.up_proj")
        inner = (
            self._activate(self._linear(x, f"{name}.gate_proj")) * up if self._config.is_gated else self._activate(up)
        )
        return self._linear(inner, f"{name}.down_proj")

    def _activate(self, x: Tensor) -> Tensor:
        kind = self._config.activation
        if kind.startswith("gelu"):
            return functional.gelu(x, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")
        return functional.silu(x) if kind == "silu" else functional.relu(x)

    def _attend(self, x: Tensor, layer: int) -> Tensor:
        config, size = self._config, len(x)
        name = f"layers.{layer}.self_attn"
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").view(size, -1, config.head_dim).transpose(0, 1) for part in "qkv"
        )
        q, k = (self._norm(heads, f"{name}.{part}_norm") for heads, part in ((q, "q"), (k, "k")))
        rope = config.ropes[layer]
        if rope is not None:
            q, k = _rotated(q, rope, config), _rotated(k, rope, config)
        mixed = [self._part(q[:, at : at + QUERIES], k, v, at, layer) for at in range(0, size, QUERIES)]
        return self._linear(torch.cat(mixed, 1).transpose(0, 1).reshape(size, -1), f"{name}.o_proj")

    def _part(self, q: Tensor, k: Tensor, v: Tensor, start: int, layer: int) -> Tensor:
        """Returns the mixed values of tokens from `start` on, [heads, tokens, head_dim]."""
        config, window = self._config, self._config.windows[layer]
        first, end = 0, k.shape[1]
        if window is not None:
            first, end = max(0, start - window), min(end, start + q.shape[1] + window)
        mask = None
        if config.num_buckets or window is not None:
            rows = torch.arange(start, start + q.shape[1], device=q.device)[:, None]
            distances = torch.arange(first, end, device=q.device) - rows
            mask = torch.zeros(distances.shape, dtype=q.dtype, device=q.device)
            if window is not None:
                mask = mask.masked_fill(distances.abs() > window, -torch.inf)
            if config.num_buckets:
                table = torch.from_numpy(buckets(distances.cpu().numpy(), config.num_buckets)).to(q.device)
                mask = mask + self._weights["relative_bias.weight"][table].permute(2, 0, 1)
            mask = mask.expand(q.shape[0], *distances.shape)[None]
        mixed: Tensor = functional.scaled_dot_product_attention(
            q[None],
            k[None, :, first:end],
            v[None, :, first:end],
            attn_mask=mask,
            scale=config.attention_scale,
            enable_gqa=config.num_kv_heads != config.num_heads,
        )[0]
        return mixed

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """Returns x as it is where the model has no norm of that name."""
        weight = self._weights.get(f"{name}.weight")
        if weight is None:
            return x
        if self._config.rms_norms:
            return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), self._config.norm_eps).to(x.dtype)
        return functional.layer_norm(x, x.shape[-1:], weight, self._weights.get(f"{name}.bias"), self._config.norm_eps)


def _rotated(x: Tensor, rope: RopeConfig, config: EncoderConfig) -> Tensor:
    """Returns heads [heads, tokens, head_dim] turned by their positions."""
    turns = torch.from_numpy(frequencies(rope, config.head_dim, config.max_tokens)).to(x.device)
    angles = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * turns
    cos, sin = (part.to(x.dtype) for part in (angles.cos(), angles.sin()))
    size = 2 * len(turns)
    left, right = x[..., : size // 2], x[..., size // 2 : size]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., size:]), -1)
