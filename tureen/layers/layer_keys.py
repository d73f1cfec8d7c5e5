"""The description of the keys and values of a layer, if layers differ in them (Gemma 3n and 4). No torch."""

from __future__ import annotations

import msgspec


class LayerKeys(msgspec.Struct, frozen=True):
    """The keys and values of a layer."""

    num_heads: int
    head_dim: int
    are_values: bool = False  # values are the output of k_proj, before the norm and the rotation of keys
    of_layer: int | None = None  # the layer whose keys and values this layer uses; None: its own
