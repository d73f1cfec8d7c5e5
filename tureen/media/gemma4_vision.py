"""Describes the vision encoder of Gemma 4. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from tureen.errors import echo
from tureen.media.settings import Settings
from tureen.media.vision_config import ACTIVATIONS, tower_heads

PREFIXES: Final = ("model.", "vision_tower.")
"""Prefixes that are left out, in this order, where a name begins so."""
LAYER: Final = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(.+)")
NAMES: Final = {
    "patch_embedder.input_proj.weight": "patches.weight",
    "patch_embedder.position_embedding_table": "positions",
    "std_bias": "std_bias",
    "std_scale": "std_scale",
    "embed_vision.embedding_projection.weight": "projector.weight",
}
PRODUCTS: Final = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
NORMS: Final = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "pre_feedforward_layernorm": "norm3",
    "post_feedforward_layernorm": "norm4",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}
MOST_TOKENS: Final = (70, 140, 280, 560, 1120)
"""The values of max_soft_tokens, a picture's most tokens, that the models were trained with."""
BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")


class Gemma4Vision(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a vision transformer with norms on both sides of each part, and of the matrix that makes
    embeddings of averaged features."""

    module: ClassVar[str] = "tureen.vision.gemma4"

    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int
    num_positions: int  # of the tables of rows and of columns
    pooled: int  # features along a side of the square that is averaged
    activation: str
    norm_eps: float
    rope_theta: float
    has_bounds: bool  # of what goes into products and comes out of them
    is_standardised: bool  # features are shifted and scaled after they are averaged

    @property
    def token_side(self) -> int:
        """The side, in pixels, of the square that becomes a token."""
        return self.patch_size * self.pooled

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights by the names used here; hidden_size: the language model's."""
        own = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "patches.weight": (own, 3 * self.patch_size**2),
            "positions": (2, self.num_positions, own),
            "projector.weight": (hidden_size, own),
        }
        if self.is_standardised:
            shapes |= {"std_bias": (own,), "std_scale": (own,)}
        layer = self._layer_weights()
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def _layer_weights(self) -> dict[str, tuple[int, ...]]:
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {f"norm{number}": (hidden,) for number in range(1, 5)}
        shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        products = dict.fromkeys("qkv", (heads, hidden)) | {"out": (hidden, heads)}
        products |= {"gate": (self.mlp_size, hidden), "up": (self.mlp_size, hidden), "down": (hidden, self.mlp_size)}
        for name, shape in products.items():
            shapes[f"{name}.weight"] = shape
            if self.has_bounds:
                shapes |= {f"{name}.{bound}": () for bound in BOUNDS}
        return shapes

    def local_name(self, name: str) -> str:
        """Returns the name used here of a checkpoint's weight: all are used. Raises KeyError."""
        short = name
        for prefix in PREFIXES:
            short = short.removeprefix(prefix)
        if (match := LAYER.fullmatch(short)) is None:
            return NAMES[short]
        part, kind = match[2].removesuffix(".linear"), match[3]
        if part in NORMS and kind == "weight":
            return f"layers.{int(match[1])}.{NORMS[part]}"
        if kind != "weight" and kind not in BOUNDS:
            raise KeyError(name)
        return f"layers.{int(match[1])}.{PRODUCTS[part]}.{kind}"


def parse_vision(hf: Mapping[str, Any]) -> Gemma4Vision:
    """Reads config.json. Raises StartupError naming the key at fault."""
    whole = Settings("config.json", hf)
    if whole.part("text_config").get("pad_token_id", 0) != 0:
        raise whole.part("text_config").fault("pad_token_id", "must be 0 in a vision model")
    config = whole.part("vision_config")
    config.word("model_type", ("gemma4_vision",), "gemma4_vision")
    hidden, heads = tower_heads(config, 768, 12)
    head_dim = config.integer("head_dim", 64)
    if head_dim % 4:
        raise config.fault("head_dim", f"{head_dim} has no halves for rows and columns; 4 must divide it")
    if config.integer("num_key_value_heads", 12) != heads:
        raise config.fault("num_key_value_heads", f"must be num_attention_heads, {heads}")
    if config.flag("attention_bias", False):
        raise config.fault("attention_bias", "true is not supported")
    return Gemma4Vision(
        hidden_size=hidden,
        mlp_size=config.integer("intermediate_size", 3072),
        num_layers=config.integer("num_hidden_layers", 16),
        num_heads=heads,
        head_dim=head_dim,
        patch_size=config.integer("patch_size", 16),
        num_positions=config.integer("position_embedding_size", 10240),
        pooled=config.integer("pooling_kernel_size", 3),
        activation=config.word("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=_theta(config),
        has_bounds=config.flag("use_clipped_linears", False),
        is_standardised=config.flag("standardize", False),
    )


def _theta(config: Settings) -> float:
    """Returns the base of the rotation's frequencies."""
    rope = config.part("rope_parameters")
    kind = rope.get("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise rope.fault("rope_type", f"{echo(kind)} is not supported; known: axial")
    return rope.number("rope_theta", 100.0)
