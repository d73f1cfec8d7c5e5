"""The description of a second embedding (Gemma 3n and 4). No torch."""

from __future__ import annotations

import msgspec


class LayerInputs(msgspec.Struct, frozen=True):
    """A second embedding of each token, of which every layer has a part (Gemma 3n and 4).

    A part is the sum of what the token's row has for the layer and of a projection of the token's first embedding. It
    gates a projection of the layer's result, which is added to the result.
    """

    vocab_size: int
    size: int  # of a layer's part
