"""Reads which layers use the keys and values of earlier ones (Gemma 3n and 4)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tureen.models.config import ModelConfig
from tureen.models.reading import fault, layer_number
from tureen.weights.stored import Stored

UNUSED = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.")
"""Names of weights that checkpoints may hold for layers that use the keys of another."""


def shared_layers(hf: Mapping[str, Any], windows: tuple[int | None, ...]) -> list[int | None]:
    """Returns, per layer, the earlier layer whose keys it uses; None: its own.

    A sharing layer uses the last layer with the same window and keys of its own. Raises StartupError if there is none.
    """
    num_shared = layer_number(hf, "num_kv_shared_layers", 0)
    num_own = len(windows) - num_shared
    last = {window: layer for layer, window in enumerate(windows[: max(0, num_own)])}
    if not last.keys() >= set(windows):
        left = f"{num_shared} of {len(windows)} leaves no layer of each kind with keys of its own"
        raise fault("num_kv_shared_layers", left)
    return [None if layer < num_own else last[window] for layer, window in enumerate(windows)]


def apart(stored: Stored, config: ModelConfig) -> Iterator[Stored]:
    """Yields a weight, unless it makes keys or values that the layer takes from an earlier one."""
    layer = UNUSED.search(stored.name)
    if layer is None or config.keys_of(min(int(layer[1]), config.num_layers - 1)).of_layer is None:
        yield stored
