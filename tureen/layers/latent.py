"""The description of latent attention (DeepSeek-V2, arXiv:2405.04434). No torch.

Keys and values of all heads are made of one latent for each token, and keys share a few rotary dimensions. The cache
holds these alone: the rotary dimensions, then the latent. So heads attend in the latent's space: a head's query is
multiplied by its matrix for keys, and the result of its attention by its matrix for values.
"""

from __future__ import annotations

import msgspec

Shapes = dict[str, tuple[int, ...]]


class Latent(msgspec.Struct, frozen=True):
    """The sizes of a layer's latent attention."""

    rank: int  # the size of the latent
    plain_dim: int  # dimensions of a head's query and key that are not rotary
    rope_dim: int  # rotary dimensions, which the keys of all heads share
    value_dim: int  # of a head's values
    query_rank: int = 0  # the size of a low-rank input of queries; 0: queries are made from the layer's input
    has_bias: bool = False  # q_a_proj, kv_a_proj_with_mqa and o_proj have a bias
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """The number of values cached per token; attention values start at `rope_dim`."""
        return self.rope_dim + self.rank

    def weights(self, hidden_size: int, num_heads: int) -> Shapes:
        """Returns the shape of every weight of a layer, by the end of its name. A head has two matrices of its own:
        k_b_proj [rank, plain_dim], transposed, and v_b_proj."""
        queries = num_heads * self.query_dim
        shapes: Shapes = {
            "self_attn.kv_a_proj_with_mqa.weight": (self.cached_dim, hidden_size),
            "self_attn.kv_a_layernorm.weight": (self.rank,),
            "self_attn.o_proj.weight": (hidden_size, num_heads * self.value_dim),
        }
        if self.query_rank:
            shapes["self_attn.q_a_proj.weight"] = (self.query_rank, hidden_size)
            shapes["self_attn.q_a_layernorm.weight"] = (self.query_rank,)
            shapes["self_attn.q_b_proj.weight"] = (queries, self.query_rank)
        else:
            shapes["self_attn.q_proj.weight"] = (queries, hidden_size)
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if self.has_bias else ():
            if f"self_attn.{name}.weight" in shapes:
                shapes[f"self_attn.{name}.bias"] = shapes[f"self_attn.{name}.weight"][:1]
        for head in range(num_heads):
            shapes[f"self_attn.k_b_proj.{head}.weight"] = (self.rank, self.plain_dim)
            shapes[f"self_attn.v_b_proj.{head}.weight"] = (self.value_dim, self.rank)
        return shapes
