"""The description of the vision encoder of LLaVA (arXiv:2304.08485) and Mistral 3, read from config.json: a vision
transformer and a projector.

It stands here because the number of a picture's tokens follows from it. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from tureen.errors import echo
from tureen.media import llava_names
from tureen.media.settings import Settings

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")
KINDS = ("clip_vision_model", "siglip_vision_model", "dinov2")
PIXTRAL = "pixtral"
"""A kind of tower (arXiv:2410.07073) for families that take pictures of any shape."""
CLIP_LARGE = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""CLIP ViT-L/14 at 336 pixels (arXiv:2103.00020): the tower of a config that names none."""


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a vision transformer (arXiv:2010.11929): a layer adds attention(norm(x)) to x, then
    mlp(norm(x)).

    `num_layers` counts the layers whose output is used; a checkpoint may have more.
    """

    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    image_size: int  # side, in pixels, of the square that there are positions for
    activation: str  # of the mlp, or of its gate
    norm_eps: float
    has_class_token: bool = True
    has_patch_bias: bool = True
    has_input_norm: bool = False
    has_qkv_bias: bool = True
    has_layer_scales: bool = False  # what a layer adds is multiplied by a vector
    has_gated_mlp: bool = False  # out(activation(gate(x)) * up(x)), gate and up in one matrix
    has_gate: bool = False  # the same with gate and up in two matrices
    has_rms_norms: bool = False
    has_biases: bool = True  # of norms, and of products without a flag of their own
    stretches: bool = False  # positions are interpolated for pictures of another size than image_size
    rope_theta: float | None = None  # positions are rotations by row and column (arXiv:2104.09864), not learnt

    def num_patches(self, height: int, width: int) -> int:
        """Returns the number of patches of a picture, by its size in pixels."""
        return (height // self.patch_size) * (width // self.patch_size)

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights that are used, by the names used here. A matrix is [outputs, inputs]."""
        hidden = self.hidden_size
        positions = self.num_patches(self.image_size, self.image_size) + self.has_class_token
        shapes: dict[str, tuple[int, ...]] = {
            "patches.weight": (hidden, 3, self.patch_size, self.patch_size),
        }
        if self.rope_theta is None:
            shapes["positions"] = (positions, hidden)
        if self.has_patch_bias:
            shapes["patches.bias"] = (hidden,)
        if self.has_class_token:
            shapes["class_token"] = (hidden,)
        if self.has_input_norm:
            shapes |= self._norm_weights("input_norm")
        layer = self._layer_weights()
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def _layer_weights(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.mlp_size
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("norm1", "norm2"):
            shapes |= self._norm_weights(name)
        for name in ("q", "k", "v"):
            shapes |= _product_weights(name, hidden, hidden, has_bias=self.has_qkv_bias)
        rows = inner * (2 if self.has_gated_mlp else 1)
        products = {"out": (hidden, hidden), "fc1": (rows, hidden), "fc2": (hidden, inner)}
        if self.has_gate:
            products["gate"] = (inner, hidden)
        for name, (outputs, inputs) in products.items():
            shapes |= _product_weights(name, outputs, inputs, has_bias=self.has_biases)
        if self.has_layer_scales:
            shapes |= {"scale1": (hidden,), "scale2": (hidden,)}
        return shapes

    def _norm_weights(self, name: str) -> dict[str, tuple[int, ...]]:
        bias = {f"{name}.bias": (self.hidden_size,)} if self.has_biases else {}
        return {f"{name}.weight": (self.hidden_size,), **bias}


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a tower and of the two-layer mlp that turns its features into the language model's
    embeddings.

    A merger, if there is one, first makes a feature of each square of patches.
    """

    module: ClassVar[str] = "tureen.vision.llava"

    tower: TowerConfig
    feature_layers: tuple[int, ...]  # whose outputs are joined to a feature; 0 = what the first layer gets
    drops_first: bool  # the tower's first token is no feature
    projector_activation: str
    projector_bias: bool
    has_newline: bool  # a learnt embedding ends each row of a picture
    merge_size: int = 1  # patches along a side of such a square
    merger_eps: float | None = None  # of the norm before the merger; None: there is no merger

    @property
    def unit(self) -> int:
        """The side, in pixels, of the square that becomes a feature."""
        return self.tower.patch_size * self.merge_size

    def num_features(self, height: int, width: int) -> int:
        """Returns the number of features of a picture or a tile, by its size in pixels."""
        return (height // self.unit) * (width // self.unit) + self.tower.has_class_token - self.drops_first

    def takes(self, height: int, width: int) -> bool:
        """Returns whether the tower takes pictures of this size."""
        size = self.tower.image_size
        if self.tower.rope_theta is not None:
            return all(side % self.unit == 0 and 0 < side < size + self.unit for side in (height, width))
        return self.tower.stretches or height == width == size

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights, like `TowerConfig.weights`; hidden_size: the language model's."""
        shapes = {f"tower.{name}": shape for name, shape in self.tower.weights().items()}
        inputs = self.tower.hidden_size * len(self.feature_layers)
        for name, size in (("projector.fc1", inputs), ("projector.fc2", hidden_size)):
            shapes |= _product_weights(name, hidden_size, size, has_bias=self.projector_bias)
        if self.merger_eps is not None:
            shapes |= {"merger.norm.weight": (inputs,), "merger.weight": (inputs, inputs * self.merge_size**2)}
        if self.has_newline:
            shapes["newline"] = (hidden_size,)
        return shapes

    def local_name(self, name: str) -> str | None:
        """Returns the name used here of a checkpoint's weight; None for one that is not used. Raises KeyError."""
        return llava_names.local_name(name, self.tower.num_layers)


def parse_vision(
    hf: Mapping[str, Any],
    default_tower: Mapping[str, Any],
    *,
    layer: int,
    strategy: str,
    has_newline: bool,
    kinds: tuple[str, ...] = KINDS,
) -> VisionConfig:
    """Reads config.json; the arguments hold where it is silent. Raises StartupError naming the key at fault.

    kinds: the towers that the family goes with.
    """
    config = Settings("config.json", hf)
    tower = parse_tower(Settings("config.json: vision_config", config.get("vision_config", default_tower)), kinds)
    layers = _feature_layers(config, layer, tower.num_layers)
    drops_first = config.word("vision_feature_select_strategy", ("default", "full"), strategy) == "default"
    if drops_first and tower.rope_theta is not None:
        raise config.fault("vision_feature_select_strategy", "must be 'full' for Pixtral's tower: no patch is dropped")
    return VisionConfig(
        tower=msgspec.structs.replace(tower, num_layers=max(layers)),
        feature_layers=layers,
        drops_first=drops_first,
        projector_activation=config.word("projector_hidden_act", ACTIVATIONS, "gelu"),
        projector_bias=config.flag("multimodal_projector_bias", True),
        has_newline=has_newline,
    )


def tile_side(config: VisionConfig) -> int:
    """Returns the patches along a side of a tile of the tower's size, where each patch is a feature. Raises
    StartupError."""
    size = config.tower.image_size
    if config.num_features(size, size) != config.tower.num_patches(size, size):
        raise Settings("config.json", {}).fault(
            "vision_feature_select_strategy",
            "tiles need one feature for each patch: 'default' for a tower with a class token, 'full' for one without",
        )
    return size // config.tower.patch_size


def _feature_layers(config: Settings, default: int, depth: int) -> tuple[int, ...]:
    """Returns the layers whose output is used, counted from 0, what the first layer gets, to `depth`, the last one's
    output."""
    value = config.get("vision_feature_layer", default)
    layers = value if isinstance(value, list) and value else [value]
    for layer in layers:
        if type(layer) is not int or not -depth - 1 <= layer <= depth:
            raise config.fault(
                "vision_feature_layer", f"must be layers of a tower of {depth}, got {echo(layer)}; 0 is its input"
            )
    return tuple(layer % (depth + 1) for layer in layers)


def _product_weights(name: str, outputs: int, inputs: int, *, has_bias: bool) -> dict[str, tuple[int, ...]]:
    bias = {f"{name}.bias": (outputs,)} if has_bias else {}
    return {f"{name}.weight": (outputs, inputs), **bias}


def parse_tower(config: Settings, kinds: tuple[str, ...]) -> TowerConfig:
    """Reads the description of a tower with all its layers. kinds: those that the family goes with, the first if none
    is named. Raises StartupError."""
    kind = config.word("model_type", kinds, kinds[0])
    if kind == PIXTRAL:
        return _pixtral(config)
    hidden, heads = tower_heads(config, 768, 12)
    default_patch = {"clip_vision_model": 32, "siglip_vision_model": 16, "dinov2": 14}[kind]
    default_act = {"clip_vision_model": "quick_gelu", "siglip_vision_model": "gelu_pytorch_tanh", "dinov2": "gelu"}
    tower = TowerConfig(
        hidden_size=hidden,
        mlp_size=_dinov2_mlp(config, hidden) if kind == "dinov2" else config.integer("intermediate_size", 3072),
        num_layers=config.integer("num_hidden_layers", 12),
        num_heads=heads,
        patch_size=config.integer("patch_size", default_patch),
        image_size=config.integer("image_size", 224),
        activation=config.word("hidden_act", ACTIVATIONS, default_act[kind]),
        norm_eps=config.number("layer_norm_eps", 1e-5 if kind == "clip_vision_model" else 1e-6),
        has_class_token=kind != "siglip_vision_model",
        has_patch_bias=kind != "clip_vision_model",
        has_input_norm=kind == "clip_vision_model",
    )
    if kind == "dinov2":
        is_gated = config.flag("use_swiglu_ffn", False)
        tower = msgspec.structs.replace(
            tower,
            activation="silu" if is_gated else tower.activation,
            has_qkv_bias=config.flag("qkv_bias", True),
            has_layer_scales=True,
            has_gated_mlp=is_gated,
            stretches=True,
        )
    return tower


def tower_heads(config: Settings, hidden: int, heads: int) -> tuple[int, int]:
    """Returns the tower's width and number of heads; the arguments are the defaults. Raises StartupError."""
    hidden, heads = config.integer("hidden_size", hidden), config.integer("num_attention_heads", heads)
    if hidden % heads:
        raise config.fault("hidden_size", f"{hidden} is not a multiple of num_attention_heads, {heads}")
    if config.integer("num_channels", 3) != 3:
        raise config.fault("num_channels", "only 3 is supported")
    return hidden, heads


def _pixtral(config: Settings) -> TowerConfig:
    """Returns Pixtral's tower: the row rotates half of a head's pairs, the column the others."""
    hidden, heads = tower_heads(config, 1024, 16)
    head_dim = hidden // heads
    if head_dim % 4:
        raise config.fault("hidden_size", f"heads of {head_dim} have no halves for rows and columns; 4 must divide it")
    if config.integer("head_dim", head_dim) != head_dim:
        raise config.fault("head_dim", f"must be hidden_size / num_attention_heads, {head_dim}")
    return TowerConfig(
        hidden_size=hidden,
        mlp_size=config.integer("intermediate_size", 4096),
        num_layers=config.integer("num_hidden_layers", 24),
        num_heads=heads,
        patch_size=config.integer("patch_size", 16),
        image_size=config.integer("image_size", 1024),
        activation=config.word("hidden_act", ACTIVATIONS, "gelu"),
        norm_eps=1e-5,
        has_class_token=False,
        has_patch_bias=False,
        has_input_norm=True,
        has_qkv_bias=False,
        has_gate=True,
        has_rms_norms=True,
        has_biases=False,
        rope_theta=_theta(config),
    )


def _theta(config: Settings) -> float:
    """Returns the base of the rotations' frequencies, which newer configs have in rope_parameters."""
    if config.get("rope_scaling") is not None:
        raise config.fault("rope_scaling", "is not supported")
    rope = config.part("rope_parameters")
    rope.word("rope_type", ("axial", "default"), "default")
    return rope.number("rope_theta", config.number("rope_theta", 10000.0))


def _dinov2_mlp(config: Settings, hidden: int) -> int:
    """Returns the inner size of DINOv2's mlp; the gated one is narrower, by two thirds and to a multiple of 8
    (arXiv:2002.05202)."""
    size = int(hidden * config.number("mlp_ratio", 4))
    return (int(size * 2 / 3) + 7) // 8 * 8 if config.flag("use_swiglu_ffn", False) else size
