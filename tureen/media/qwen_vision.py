"""The description of the vision encoder of Qwen's models: a vision transformer whose queries and keys turn with a
patch's row and column, and one or more mlps that merge neighbouring patches. No torch.

Sources: arXiv:2409.12191 (Qwen2-VL), arXiv:2502.13923 (Qwen2.5-VL: windows, gates), arXiv:2511.21631 (Qwen3-VL: learned
positions, deep features).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from tureen.errors import echo
from tureen.media.settings import Settings
from tureen.media.vision_config import ACTIVATIONS

QWEN2_5: Final = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "patch_size": 14,
    "out_hidden_size": 3584,
}
QWEN3: Final = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "out_hidden_size": 3584,
}
"""Values of keys that configs leave out."""
WINDOW, FULL_LAYERS = 112, [7, 15, 23, 31]
"""The same for Qwen2.5-VL: pixels along a window's side, and the layers that have none."""
TABLE, DEEP_LAYERS = 2304, [8, 16, 24]
"""The same for Qwen3-VL: learned positions, and the layers whose output is used."""
THETA = 10000.0

PREFIXES: Final = ("model.", "visual.")
LAYER: Final = re.compile(r"blocks\.(\d+)\.(.+)")
DEEP: Final = re.compile(r"deepstack_merger_list\.(\d+)\.(.+)")
NAMES: Final = {"patch_embed.proj": "patches"}
MERGER_NAMES: Final = {
    "ln_q": "norm",
    "norm": "norm",
    "mlp.0": "fc1",
    "linear_fc1": "fc1",
    "mlp.2": "fc2",
    "linear_fc2": "fc2",
}
LAYER_NAMES: Final = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.qkv": "qkv",
    "attn.proj": "out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.fc1": "up",
    "mlp.linear_fc1": "up",
    "mlp.down_proj": "down",
    "mlp.fc2": "down",
    "mlp.linear_fc2": "down",
}


class QwenVision(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a Qwen's vision transformer and its mergers."""

    module: ClassVar[str] = "tureen.vision.qwen"

    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge: int  # patches along the side of a square that becomes one token
    num_frames: int  # that a patch spans; a picture is repeated
    activation: str
    out_size: int
    theta: float  # base frequency of the rotation
    has_gates: bool = False  # down(activation(gate(x)) * up(x)), and norms without a mean
    window: int = 0  # tokens along a window's side; 0: patches attend to all
    full_layers: tuple[int, ...] = ()  # with windows: layers whose patches attend to all
    table_side: int = 0  # of the square of learned positions, stretched to the picture; 0: none
    deep_layers: tuple[int, ...] = ()  # whose outputs are merged too, for the first layers of the language model

    @property
    def token_side(self) -> int:
        """The pixels along the side of the square that becomes one token."""
        return self.patch_size * self.merge

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights by the names used here. Raises StartupError for a language model of another
        size."""
        if self.out_size != hidden_size:
            key = "out_hidden_size" if self.has_gates or self.table_side else "hidden_size"
            raise _settings({}).fault(
                key, f"must be the language model's hidden_size, {hidden_size}, got {self.out_size}"
            )
        hidden, patch = self.hidden_size, self.patch_size
        shapes: dict[str, tuple[int, ...]] = {"patches.weight": (hidden, 3, self.num_frames, patch, patch)}
        if self.table_side:
            shapes |= {"patches.bias": (hidden,), "positions": (self.table_side**2, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in self._layer_weights().items()}
        shapes |= self._merger_weights("merger", hidden)
        for index in range(len(self.deep_layers)):
            shapes |= self._merger_weights(f"deep.{index}", hidden * self.merge**2)
        return shapes

    def local_name(self, name: str) -> str:
        """Returns the name used here of a checkpoint's weight. Raises KeyError for an unknown one."""
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        stem, _, kind = name.rpartition(".")
        if match := LAYER.fullmatch(stem):
            return f"layers.{match[1]}.{LAYER_NAMES[match[2]]}.{kind}"
        if match := DEEP.fullmatch(stem):
            return f"deep.{match[1]}.{MERGER_NAMES[match[2]]}.{kind}"
        if stem.startswith("merger."):
            return f"merger.{MERGER_NAMES[stem.removeprefix('merger.')]}.{kind}"
        return "positions" if name == "pos_embed.weight" else f"{NAMES[stem]}.{kind}"

    def _layer_weights(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.mlp_size
        sizes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        if self.has_gates:
            sizes["gate"] = (inner, hidden)
        shapes = self._norm_weights("norm1", hidden) | self._norm_weights("norm2", hidden)
        return shapes | _linear_weights(sizes)

    def _merger_weights(self, name: str, norm_size: int) -> dict[str, tuple[int, ...]]:
        wide = self.hidden_size * self.merge**2
        sizes = {f"{name}.fc1": (wide, wide), f"{name}.fc2": (self.out_size, wide)}
        return self._norm_weights(f"{name}.norm", norm_size) | _linear_weights(sizes)

    def _norm_weights(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,)}
        return weight if self.has_gates else weight | {f"{name}.bias": (size,)}


def qwen2_vision(hf: Mapping[str, Any]) -> QwenVision:
    """Reads the vision part of Qwen2-VL's config.json. Raises StartupError naming the key at fault."""
    values = hf.get("vision_config") or {}
    own = _settings(values)
    hidden, heads = own.integer("embed_dim", 1280), own.integer("num_heads", 16)
    if hidden % (4 * heads):
        raise own.fault("embed_dim", f"{hidden} is not a multiple of 4 x num_heads, {4 * heads}")
    inner = int(hidden * own.number("mlp_ratio", 4))
    if inner < 1:
        raise own.fault("mlp_ratio", f"must make an inner size of at least 1 of embed_dim, {hidden}")
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "out_hidden_size": own.integer("hidden_size", 3584)}
    return _common(_settings({**values, **sizes, "hidden_act": own.get("hidden_act", "quick_gelu")}), QWEN2_5)


def qwen2_5_vision(hf: Mapping[str, Any]) -> QwenVision:
    """Reads the vision part of Qwen2.5-VL's config.json. Raises StartupError naming the key at fault."""
    settings = _settings(hf.get("vision_config") or {})
    vision = _common(settings, QWEN2_5)
    pixels, unit = settings.integer("window_size", WINDOW), vision.token_side
    if pixels < unit:
        raise settings.fault("window_size", f"must be at least {unit} pixels, one token, got {pixels}")
    return msgspec.structs.replace(
        vision,
        has_gates=True,
        window=pixels // vision.merge // vision.patch_size,
        full_layers=_layers(settings, "fullatt_block_indexes", FULL_LAYERS, None),
    )


def qwen3_vision(hf: Mapping[str, Any], *, is_deep: bool) -> QwenVision:
    """Reads the vision part of the config.json of Qwen3-VL or, not deep, of Qwen3.5. Raises StartupError naming the key
    at fault."""
    settings = _settings(hf.get("vision_config") or {})
    vision = _common(settings, QWEN3)
    count = settings.integer("num_position_embeddings", TABLE)
    side = math.isqrt(count)
    if side * side != count:
        raise settings.fault("num_position_embeddings", f"must be a square number, got {count}")
    deep = _layers(settings, "deepstack_visual_indexes", DEEP_LAYERS if is_deep else [], vision.num_layers)
    if deep and not is_deep:
        raise settings.fault("deepstack_visual_indexes", f"must be empty for this model, got {echo(list(deep))}")
    return msgspec.structs.replace(vision, table_side=side, deep_layers=deep)


def _settings(values: Any) -> Settings:
    return Settings("config.json: vision_config", values)


def _common(settings: Settings, defaults: Mapping[str, Any]) -> QwenVision:
    hidden, heads = settings.integer("hidden_size", defaults["hidden_size"]), settings.integer("num_heads", 16)
    if hidden % (4 * heads):
        raise settings.fault("hidden_size", f"{hidden} is not a multiple of 4 x num_heads, {4 * heads}")
    for key in ("in_channels", "in_chans"):
        if settings.integer(key, 3) != 3:
            raise settings.fault(key, "only 3 is supported")
    rope = settings.part("rope_parameters")
    rope.word("rope_type", ("axial", "default"), "axial")
    return QwenVision(
        hidden_size=hidden,
        mlp_size=settings.integer("intermediate_size", defaults["intermediate_size"]),
        num_layers=settings.integer("depth", defaults["depth"]),
        num_heads=heads,
        patch_size=settings.integer("patch_size", defaults["patch_size"]),
        merge=settings.integer("spatial_merge_size", 2),
        num_frames=settings.integer("temporal_patch_size", 2),
        activation=settings.word("hidden_act", ACTIVATIONS, defaults["hidden_act"]),
        out_size=settings.integer("out_hidden_size", defaults["out_hidden_size"]),
        theta=rope.number("rope_theta", THETA),
    )


def _layers(settings: Settings, key: str, default: list[int], end: int | None) -> tuple[int, ...]:
    """Reads numbers of layers, each once and below `end`."""
    layers = settings.get(key, default)
    is_list = isinstance(layers, list) and all(type(layer) is int and layer >= 0 for layer in layers)
    if not is_list or len(set(layers)) < len(layers) or any(end is not None and layer >= end for layer in layers):
        raise settings.fault(key, f"must be a list of different layers, got {echo(layers)}")
    return tuple(layers)


def _linear_weights(sizes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in sizes.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    return shapes
