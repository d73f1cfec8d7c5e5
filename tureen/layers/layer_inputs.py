"""The description of a second embedding (Gemma 3n and 4). No torch."""

from __future__ import annotations

import msgspec


class LayerInputs(msgspec.Struct, frozen=True):
    """A second embedding of each token, with a part for every layer (Gemma 3n and 4).

    A part is the sum of the layer's slice of the token's row and a projection of the token's first embedding. The part
    multiplies a gate made from the layer's result. A projection of the product is added to the result. Tokens given as
    embeddings use the first row.
    """

    vocab_size: int
    size: int  # the size of a layer's part
