"""The descriptions of what each layer of Gemma's later decoders has of its own: keys, and a second embedding. No
torch."""

from __future__ import annotations

import msgspec


class LayerKeys(msgspec.Struct, frozen=True):
    """The keys and values of a layer."""

    num_heads: int
    head_dim: int
    are_values: bool = False  # values are made by k_proj too, without the norm and the rotation of keys
    of_layer: int | None = None  # the layer whose keys and values this one attends to; None: its own


class LayerInputs(msgspec.Struct, frozen=True):
    """A second embedding of each token, of which every layer has a part (Gemma 3n and 4).

    A part is the sum of what the token's row has for the layer and of a projection of the token's first embedding. It
    gates a projection of the layer's result, which is added to the result.
    """

    vocab_size: int
    size: int  # of a layer's part
    fill_token: int = 0  # its row is used for tokens given as embeddings
