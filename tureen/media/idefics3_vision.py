"""The description of the vision encoder of Idefics3 and SmolVLM: a vision transformer and one matrix. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from tureen.media import llava_names
from tureen.media.settings import Settings
from tureen.media.vision_config import ACTIVATIONS, TowerConfig, tower_heads

KINDS: Final = ("idefics3_vision", "idefics3", "smolvlm_vision", "smolvlm")
NAMES: Final = {
    "vision_model.post_layernorm.weight": "norm.weight",
    "vision_model.post_layernorm.bias": "norm.bias",
    "connector.modality_projection.proj.weight": "projector.weight",
}
"""Names of weights in checkpoints -> those used here. The tower's are LLaVA's."""


class Idefics3Vision(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a tower, and of the matrix that makes one embedding of a square of its features."""

    module: ClassVar[str] = "tureen.vision.idefics3"

    tower: TowerConfig
    scale: int  # features along a side of the square

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a tile."""
        return (self.tower.image_size // self.tower.patch_size // self.scale) ** 2

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights by the names used here; hidden_size: the language model's."""
        shapes = {f"tower.{name}": shape for name, shape in self.tower.weights().items()}
        size = self.tower.hidden_size
        projector = {"projector.weight": (hidden_size, size * self.scale**2)}
        return shapes | {"norm.weight": (size,), "norm.bias": (size,)} | projector

    def local_name(self, name: str) -> str:
        """Returns the name used here of a checkpoint's weight: all are used. Raises KeyError."""
        short = name.removeprefix("model.")
        if short in NAMES:
            return NAMES[short]
        ours = llava_names.local_name(short, self.tower.num_layers) if short.startswith("vision_model.") else None
        if ours is None:
            raise KeyError(name)
        return ours

    def is_possible(self, shape: Sequence[int], layout: Sequence[int]) -> bool:
        """Returns whether a picture has this shape, [tiles, height, width], and this layout, its rows and columns."""
        if len(layout) != 2 or tuple(shape[1:]) != (self.tower.image_size,) * 2:
            return False
        rows, columns = layout
        if rows == columns == 0:
            return shape[0] == 1
        return min(layout) > 0 and rows * columns > 1 and shape[0] == rows * columns + 1


def parse_vision(hf: Mapping[str, Any]) -> Idefics3Vision:
    """Reads config.json. Raises StartupError naming the key at fault."""
    config = Settings("config.json", hf)
    tower, scale = _tower(config.part("vision_config")), config.integer("scale_factor", 2)
    side = tower.image_size // tower.patch_size
    if side < 1 or side % scale:
        raise config.fault("scale_factor", f"{scale} must divide the patches along a side of a tile, {side}")
    return Idefics3Vision(tower=tower, scale=scale)


def _tower(config: Settings) -> TowerConfig:
    config.word("model_type", KINDS, KINDS[0])
    hidden, heads = tower_heads(config, 1152, 16)
    return TowerConfig(
        hidden_size=hidden,
        mlp_size=config.integer("intermediate_size", 3072),
        num_layers=config.integer("num_hidden_layers", 12),
        num_heads=heads,
        patch_size=config.integer("patch_size", 32),
        image_size=config.integer("image_size", 224),
        activation=config.word("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        norm_eps=config.number("layer_norm_eps", 1e-6),
        has_class_token=False,
    )
