"""Layers of the torch model that mix tokens without attention; see mixers.py for what each computes.

The tokens of a sequence pass one by one, so the results do not depend on how a prompt is cut, or on other sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tureen.layers.activation import by_rows, sigmoid, silu
from tureen.layers.attention import Attention, Step
from tureen.layers.linear import Linear
from tureen.layers.mixers import GatedDelta, KimiDelta, Mamba2, ShortConv
from tureen.layers.norm import RMSNorm

EPS = 1e-6  # added to the squared length of queries and keys


class ShortConvLayer:
    """See mixers.ShortConv."""

    def __init__(self, mixer: ShortConv, hidden_size: int, start: int, dtype: torch.dtype) -> None:
        """start: the place of the layer's numbers in a state."""
        self._mixer = mixer
        self._start = start
        self._in = Linear(hidden_size, {"in_proj": 3 * mixer.size}, bias=mixer.has_bias, dtype=dtype)
        self._out = Linear(mixer.size, {"out_proj": hidden_size}, bias=mixer.has_bias, dtype=dtype)
        self._kernel = torch.empty(mixer.size, 1, mixer.kernel, dtype=torch.float32)
        self._bias = torch.empty(mixer.size, dtype=torch.float32) if mixer.has_bias else None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        states, size = step.recurrent, self._mixer.size
        first, second, third = self._in(x).float().chunk(3, dim=-1)
        products, mixed = first * third, torch.empty_like(first)
        for span in step.spans:
            window = states.before(span, self._start, self._mixer.state_floats).view(-1, size)
            for index in range(span.length):
                token = span.first + index
                mixed[token], window = convolved(window, products[token], self._kernel, self._bias)
                states.save(span, index + 1, self._start, window)
        return self._out((second * mixed).to(x.dtype))

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        prefix = prefix.replace(".self_attn.", ".conv.")
        yield from self._in.weights(prefix)
        yield from self._out.weights(prefix)
        yield f"{prefix}conv.weight", self._kernel
        if self._bias is not None:
            yield f"{prefix}conv.bias", self._bias

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        prefix = prefix.replace(".self_attn.", ".conv.")
        yield prefix, self._in
        yield prefix, self._out

    def finish(self) -> None:
        self._in.finish()
        self._out.finish()


class GatedDeltaLayer:
    """See mixers.GatedDelta."""

    def __init__(self, mixer: GatedDelta, hidden_size: int, start: int, eps: float, dtype: torch.dtype) -> None:
        """start: the place of the layer's numbers in a state. eps: of the norm of what each head gives."""
        self._mixer = mixer
        self._start = start
        heads = mixer.num_value_heads
        sizes = {"qkv": mixer.channels, "z": mixer.width, "b": heads, "a": heads}
        self._sizes = list(sizes.values())
        parts = {f"in_proj_{name}": size for name, size in sizes.items()}
        self._in = Linear(hidden_size, parts, bias=False, dtype=dtype)
        self._out = Linear(mixer.width, {"out_proj": hidden_size}, bias=False, dtype=dtype)
        self._kernel = torch.empty(mixer.channels, 1, mixer.kernel, dtype=torch.float32)
        self._log_decay = torch.empty(heads, dtype=torch.float32)
        self._dt_bias = torch.empty(heads, dtype=torch.float32)
        self._norm = RMSNorm(mixer.value_dim, eps)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        mixer, states = self._mixer, step.recurrent
        qkv, z, b, a = self._in(x).float().split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        rate = -self._log_decay.exp() * by_rows(functional.softplus, a + self._dt_bias)
        decay = by_rows(torch.exp, rate)
        beta = sigmoid(b)
        mixed = qkv.new_empty(x.shape[0], mixer.num_value_heads, mixer.value_dim)
        for span in step.spans:
            numbers = states.before(span, self._start, mixer.state_floats)
            window = numbers[: -self._matrix_floats].view(-1, mixer.channels)
            matrices = numbers[-self._matrix_floats :].view(mixer.num_value_heads, mixer.key_dim, mixer.value_dim)
            for index in range(span.length):
                token = span.first + index
                channels, window = convolved(window, qkv[token], self._kernel, None)
                mixed[token], matrices = self._followed(channels, matrices, decay[token], beta[token])
                states.save(span, index + 1, self._start, torch.cat((window.reshape(-1), matrices.reshape(-1))))
        gates = z.view(mixed.shape)
        return self._out((self._norm(mixed) * silu(gates.flatten(1)).view(mixed.shape)).flatten(1).to(x.dtype))

    @property
    def _matrix_floats(self) -> int:
        return self._mixer.num_value_heads * self._mixer.key_dim * self._mixer.value_dim

    def _followed(self, channels: Tensor, matrices: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Passes one token, whose channels [channels] come from the convolution. Returns what the heads give, and their
        matrices [heads, key_dim, value_dim]."""
        mixer = self._mixer
        keys = mixer.num_key_heads * mixer.key_dim
        channels = silu(channels[None])[0]
        query, key = (vectors.view(-1, mixer.key_dim) for vectors in (channels[:keys], channels[keys : 2 * keys]))
        value = channels[2 * keys :].view(-1, mixer.value_dim)
        each = len(value) // len(query)
        query, key = (
            unit.repeat(each, 1) if mixer.is_apart else unit.repeat_interleave(each, dim=0)
            for unit in (_unit(query), _unit(key))
        )
        return delta_step(matrices, query * mixer.key_dim**-0.5, key, value, decay[:, None], beta)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        prefix = prefix.replace(".self_attn.", ".linear_attn.")
        yield from self._in.weights(prefix)
        yield from self._out.weights(prefix)
        yield f"{prefix}conv1d.weight", self._kernel
        yield f"{prefix}A_log", self._log_decay
        yield f"{prefix}dt_bias", self._dt_bias
        yield from self._norm.weights(f"{prefix}norm")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        prefix = prefix.replace(".self_attn.", ".linear_attn.")
        yield prefix, self._in
        yield prefix, self._out

    def finish(self) -> None:
        self._in.finish()
        self._out.finish()


class KimiDeltaLayer:
    """See mixers.KimiDelta."""

    def __init__(self, mixer: KimiDelta, hidden_size: int, start: int, eps: float, dtype: torch.dtype) -> None:
        """start: the place of the layer's numbers in a state. eps: of the norm of what each head gives."""
        self._mixer = mixer
        self._start = start
        width, heads, dim = mixer.width, mixer.num_heads, mixer.head_dim
        sizes = {"q_proj": width, "k_proj": width, "v_proj": width, "b_proj": heads, "f_a_proj": dim, "g_a_proj": dim}
        self._sizes = [mixer.channels, heads, dim, dim]
        self._in = Linear(hidden_size, sizes, bias=False, dtype=dtype)
        self._decays, self._gates = (
            Linear(dim, {f"{name}_b_proj": width}, bias=False, dtype=dtype) for name in ("f", "g")
        )
        self._out = Linear(width, {"o_proj": hidden_size}, bias=False, dtype=dtype)
        self._kernel = torch.empty(mixer.channels, 1, mixer.kernel, dtype=torch.float32)
        self._log_decay = torch.empty(heads, dtype=torch.float32)
        self._dt_bias = torch.empty(width, dtype=torch.float32)
        self._norm = RMSNorm(dim, eps)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        mixer, states, tokens = self._mixer, step.recurrent, x.shape[0]
        shape = tokens, mixer.num_heads, mixer.head_dim
        qkv, b, low_decay, low_gate = self._in(x).split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        rate = by_rows(functional.softplus, self._decays(low_decay).float() + self._dt_bias).view(shape)
        decay = by_rows(torch.exp, (rate * -self._log_decay.exp()[:, None]).flatten(1)).view(shape)
        beta, qkv = sigmoid(b.float()), qkv.float()
        mixed = qkv.new_empty(shape)
        num_floats = mixer.width * mixer.head_dim
        for span in step.spans:
            numbers = states.before(span, self._start, mixer.state_floats)
            window = numbers[:-num_floats].view(-1, mixer.channels)
            matrices = numbers[-num_floats:].view(mixer.num_heads, mixer.head_dim, mixer.head_dim)
            for index in range(span.length):
                token = span.first + index
                channels, window = convolved(window, qkv[token], self._kernel, None)
                query, key, value = silu(channels[None])[0].view(3, mixer.num_heads, mixer.head_dim)
                query = _unit(query) * mixer.head_dim**-0.5
                mixed[token], matrices = delta_step(matrices, query, _unit(key), value, decay[token], beta[token])
                states.save(span, index + 1, self._start, torch.cat((window.reshape(-1), matrices.reshape(-1))))
        gates = sigmoid(self._gates(low_gate).float()).view(shape)
        return self._out((self._norm(mixed) * gates).flatten(1).to(x.dtype))

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        prefix = prefix.replace(".self_attn.", ".linear_attn.")
        for linear in self._linears():
            yield from linear.weights(prefix)
        for name, kernel in zip("qkv", self._kernel.chunk(3), strict=True):
            yield f"{prefix}{name}_conv1d.weight", kernel
        yield f"{prefix}A_log", self._log_decay
        yield f"{prefix}dt_bias", self._dt_bias
        yield from self._norm.weights(f"{prefix}o_norm")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        prefix = prefix.replace(".self_attn.", ".linear_attn.")
        for linear in self._linears():
            yield prefix, linear

    def finish(self) -> None:
        for linear in self._linears():
            linear.finish()

    def _linears(self) -> tuple[Linear, ...]:
        return self._in, self._decays, self._gates, self._out


class Mamba2Layer:
    """See mixers.Mamba2."""

    def __init__(self, mixer: Mamba2, hidden_size: int, start: int, eps: float, dtype: torch.dtype) -> None:
        """start: the place of the layer's numbers in a state. eps: of the norm of the heads' results."""
        self._mixer = mixer
        self._start = start
        self._sizes = [mixer.width, mixer.channels, mixer.num_heads]
        self._in = Linear(hidden_size, {"in_proj": sum(self._sizes)}, bias=mixer.in_bias, dtype=dtype)
        self._out = Linear(mixer.width, {"out_proj": hidden_size}, bias=mixer.out_bias, dtype=dtype)
        self._kernel = torch.empty(mixer.channels, 1, mixer.kernel, dtype=torch.float32)
        self._bias = torch.empty(mixer.channels, dtype=torch.float32) if mixer.conv_bias else None
        heads = {name: torch.empty(mixer.num_heads, dtype=torch.float32) for name in ("A_log", "dt_bias", "D")}
        self._heads = heads
        self._norm_weight = torch.empty(mixer.width, dtype=torch.float32) if mixer.has_norm else None
        self._eps = eps

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        mixer, states = self._mixer, step.recurrent
        projected = self._in(x if mixer.in_scale == 1 else x * mixer.in_scale).float()
        gate, inputs, steps = projected.split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        inputs = inputs * torch.cat([inputs.new_full((size,), scale) for scale, size in mixer.channel_scales()])
        steps = by_rows(functional.softplus, steps * mixer.scales[4] + self._heads["dt_bias"])
        steps = steps.clamp(*mixer.step_limits)
        decay = by_rows(torch.exp, -self._heads["A_log"].exp() * steps)
        mixed = inputs.new_empty(x.shape[0], mixer.num_heads, mixer.head_dim)
        for span in step.spans:
            numbers = states.before(span, self._start, mixer.state_floats)
            size = (mixer.kernel - 1) * mixer.channels
            window = numbers[:size].view(mixer.kernel - 1, mixer.channels)
            matrices = numbers[size:].view(mixer.num_heads, mixer.state_dim, mixer.head_dim)
            for index in range(span.length):
                token = span.first + index
                channels, window = convolved(window, inputs[token], self._kernel, self._bias)
                mixed[token], matrices = self._followed(channels, matrices, decay[token], steps[token])
                states.save(span, index + 1, self._start, torch.cat((window.reshape(-1), matrices.reshape(-1))))
        result = self._out(self._gated(mixed.flatten(1), silu(gate * mixer.scales[0])).to(x.dtype))
        return result if mixer.out_scale == 1 else result * mixer.out_scale

    def _followed(self, channels: Tensor, matrices: Tensor, decay: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Passes one token, whose channels [channels] come from the convolution. Returns the heads' results and their
        matrices [heads, state_dim, head_dim]."""
        mixer = self._mixer
        group = mixer.num_groups * mixer.state_dim
        channels = silu(channels[None])[0]
        values = channels[: mixer.width].view(mixer.num_heads, mixer.head_dim)
        key, query = (
            vectors.view(mixer.num_groups, -1).repeat_interleave(mixer.num_heads // mixer.num_groups, dim=0)
            for vectors in (channels[mixer.width : -group], channels[-group:])
        )
        matrices = matrices * decay[:, None, None] + key[:, :, None] * (values * steps[:, None])[:, None]
        return (matrices * query[:, :, None]).sum(dim=1) + values * self._heads["D"][:, None], matrices

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Returns the heads' results times the gate, normalised group by group, both [tokens, width]."""
        weight, is_last = self._norm_weight, self._mixer.gate_last
        if weight is None:
            return mixed * gate
        grouped = (mixed if is_last else mixed * gate).view(len(mixed), self._mixer.num_groups, -1)
        squares = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True).square_().mul_(1 / grouped.shape[-1])
        normed = grouped.mul(squares.add_(self._eps).rsqrt_()).flatten(1) * weight
        return normed * gate if is_last else normed

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        prefix = prefix.replace(".self_attn.", ".mamba.")
        yield from self._in.weights(prefix)
        yield from self._out.weights(prefix)
        yield f"{prefix}conv1d.weight", self._kernel
        if self._bias is not None:
            yield f"{prefix}conv1d.bias", self._bias
        for name, values in self._heads.items():
            yield f"{prefix}{name}", values
        if self._norm_weight is not None:
            yield f"{prefix}norm.weight", self._norm_weight

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        prefix = prefix.replace(".self_attn.", ".mamba.")
        yield prefix, self._in
        yield prefix, self._out

    def finish(self) -> None:
        self._in.finish()
        self._out.finish()


RecurrentLayer = ShortConvLayer | GatedDeltaLayer | KimiDeltaLayer | Mamba2Layer


class Beside:
    """Attention and a mixer that see the same inputs, and whose results are added (Falcon-H1)."""

    def __init__(
        self,
        attention: Attention,
        mixer: RecurrentLayer,
        in_scale: float,
        out_scale: float,
    ) -> None:
        """in_scale, out_scale: factors of the attention's inputs and of its results."""
        self._attention = attention
        self._mixer = mixer
        self._in_scale = in_scale
        self._out_scale = out_scale

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self._attention(x * self._in_scale, step) * self._out_scale + self._mixer(x, step)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._attention.weights(prefix)
        yield from self._mixer.weights(prefix)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield from self._attention.linears(prefix)
        yield from self._mixer.linears(prefix)

    def finish(self) -> None:
        self._attention.finish()
        self._mixer.finish()


def convolved(window: Tensor, newest: Tensor, kernel: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolves the last inputs of each channel: window [tokens - 1, channels], the oldest first, and the newest one.

    Returns the results [channels], and the window that the next token sees.
    """
    inputs = torch.cat((window, newest[None]))
    result = (inputs.T * kernel[:, 0]).sum(dim=1)
    return (result if bias is None else result + bias), inputs[1:]


def delta_step(
    matrices: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Passes one token through the delta rule of heads.

    matrices: [heads, key_dim, value_dim]; query, key: [heads, key_dim]; value: [heads, value_dim]; decay: [heads,
    key_dim or 1]; beta: [heads]. Returns what the heads give, [heads, value_dim], and their new matrices.
    """
    matrices = matrices * decay[:, :, None]
    known = (matrices * key[:, :, None]).sum(dim=1)
    change = (value - known) * beta[:, None]
    matrices = matrices + key[:, :, None] * change[:, None]
    return (matrices * query[:, :, None]).sum(dim=1), matrices


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + EPS)
