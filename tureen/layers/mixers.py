"""The descriptions of layers that mix tokens without attention. No torch.

Each keeps a state for a sequence: float32 numbers whose size does not depend on the sequence's length.
"""

from __future__ import annotations

import math

import msgspec

Shapes = dict[str, tuple[int, ...]]


class ShortConv(msgspec.Struct, frozen=True, tag=True):
    """A gated convolution over the last tokens (LFM2, arXiv:2511.23404): C * conv(B * x).

    The state holds the last `kernel - 1` products B * x, the oldest first.
    """

    size: int  # channels
    kernel: int  # tokens
    has_bias: bool

    @property
    def state_floats(self) -> int:
        return (self.kernel - 1) * self.size

    def weights(self, hidden_size: int) -> Shapes:
        """Returns the shape of every weight of a layer, by the end of its name."""
        shapes: Shapes = {
            "conv.in_proj.weight": (3 * self.size, hidden_size),
            "conv.conv.weight": (self.size, 1, self.kernel),
            "conv.out_proj.weight": (hidden_size, self.size),
        }
        biases = {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in shapes.items()}
        return shapes | biases if self.has_bias else shapes


class GatedDelta(msgspec.Struct, frozen=True, tag=True):
    """A gated delta rule (arXiv:2412.06464) after a convolution over the last tokens.

    Each value head has a matrix [key_dim, value_dim], which decays, forgets the value that it has for the token's key
    and stores the token's value under that key. The state holds the convolution's last inputs, then these matrices.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens of the convolution
    is_apart: bool = False  # value heads that share a key head are num_key_heads apart (llama.cpp), not neighbours

    @property
    def channels(self) -> int:
        """The number of queries, keys and values of all heads, over which the convolution runs."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def width(self) -> int:
        """The size of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def state_floats(self) -> int:
        return (self.kernel - 1) * self.channels + self.num_value_heads * self.key_dim * self.value_dim

    def weights(self, hidden_size: int) -> Shapes:
        """Returns the shape of every weight of a layer, by the end of its name."""
        return {
            "linear_attn.in_proj_qkv.weight": (self.channels, hidden_size),
            "linear_attn.in_proj_z.weight": (self.width, hidden_size),
            "linear_attn.in_proj_b.weight": (self.num_value_heads, hidden_size),
            "linear_attn.in_proj_a.weight": (self.num_value_heads, hidden_size),
            "linear_attn.conv1d.weight": (self.channels, 1, self.kernel),
            "linear_attn.A_log": (self.num_value_heads,),
            "linear_attn.dt_bias": (self.num_value_heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (hidden_size, self.width),
        }


class KimiDelta(msgspec.Struct, frozen=True, tag=True):
    """A delta rule whose keys decay dimension by dimension (Kimi Linear, arXiv:2510.26692), after three convolutions.

    Each head has a matrix [head_dim, head_dim]; see GatedDelta. Decays and gates are products of two matrices, of which
    the first has `head_dim` outputs. The state holds the convolutions' last inputs, then the matrices.
    """

    num_heads: int
    head_dim: int
    kernel: int  # tokens of a convolution

    @property
    def width(self) -> int:
        """The size of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """The number of queries, keys and values of all heads."""
        return 3 * self.width

    @property
    def state_floats(self) -> int:
        return (self.kernel - 1) * self.channels + self.width * self.head_dim

    def weights(self, hidden_size: int) -> Shapes:
        """Returns the shape of every weight of a layer, by the end of its name."""
        shapes: Shapes = {f"{name}_proj.weight": (self.width, hidden_size) for name in "qkv"}
        shapes |= {f"{name}_conv1d.weight": (self.width, 1, self.kernel) for name in "qkv"}
        for name in "fg":
            shapes[f"{name}_a_proj.weight"] = (self.head_dim, hidden_size)
            shapes[f"{name}_b_proj.weight"] = (self.width, self.head_dim)
        shapes |= {
            "b_proj.weight": (self.num_heads, hidden_size),
            "A_log": (self.num_heads,),
            "dt_bias": (self.width,),
            "o_norm.weight": (self.head_dim,),
            "o_proj.weight": (hidden_size, self.width),
        }
        return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


class Mamba2(msgspec.Struct, frozen=True, tag=True):
    """A selective state space (Mamba 2, arXiv:2405.21060) after a convolution over the last tokens.

    Each head has a matrix [state_dim, head_dim], which decays and is updated with each token's values, then read by its
    query. Keys and queries (B and C) are shared by the heads of a group. The result is multiplied by a gate and
    normalised group by group. The state holds the convolution's last inputs, then these matrices.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    kernel: int  # tokens of the convolution
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    has_norm: bool = True
    gate_last: bool = False  # the gate is multiplied after the norm
    step_limits: tuple[float, float] = (0.0, math.inf)  # of a token's time step
    in_scale: float = 1.0  # of the inputs
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)  # of gate, values, B, C, time steps
    out_scale: float = 1.0  # of the results

    @property
    def width(self) -> int:
        """The size of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """The number of values, keys and queries, over which the convolution runs."""
        return self.width + 2 * self.num_groups * self.state_dim

    @property
    def state_floats(self) -> int:
        return (self.kernel - 1) * self.channels + self.width * self.state_dim

    def channel_scales(self) -> tuple[tuple[float, int], ...]:
        """Returns the factors of values, keys and queries, each with the number of channels it is for."""
        group = self.num_groups * self.state_dim
        return tuple(zip(self.scales[1:4], (self.width, group, group), strict=True))

    def weights(self, hidden_size: int) -> Shapes:
        """Returns the shape of every weight of a layer, by the end of its name."""
        heads = (self.num_heads,)
        shapes: Shapes = {
            "mamba.in_proj.weight": (self.width + self.channels + self.num_heads, hidden_size),
            "mamba.conv1d.weight": (self.channels, 1, self.kernel),
            "mamba.A_log": heads,
            "mamba.dt_bias": heads,
            "mamba.D": heads,
            "mamba.out_proj.weight": (hidden_size, self.width),
        }
        biases = {"in_proj": self.in_bias, "conv1d": self.conv_bias, "out_proj": self.out_bias}
        for name, is_there in biases.items():
            if is_there:
                shapes[f"mamba.{name}.bias"] = shapes[f"mamba.{name}.weight"][:1]
        if self.has_norm:
            shapes["mamba.norm.weight"] = (self.width,)
        return shapes


Mixer = ShortConv | GatedDelta | KimiDelta | Mamba2
