"""Reads LLaVAs as their authors publish them: makes the config that the same model has in Hugging Face's form.

The authors keep the language model's settings and their own, which begin with `mm_`, in one object; the vision tower is
named, not described. Facts: the repositories haotian-liu/LLaVA and LLaVA-VL/LLaVA-NeXT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tureen.errors import StartupError, echo

TEXT_TYPES: Final = {
    "LlavaLlamaForCausalLM": "llama",
    "LlavaMistralForCausalLM": "mistral",
    "LlavaQwenForCausalLM": "qwen2",
}
FIX: Final = "use the conversion of this model whose name begins with llava-hf/"
SPAN: Final = re.compile(r"\((\d)x(\d)\),\.\.\.,\((\d)x(\d)\)")
"""A grid as training scripts write it, in tiles: "(1x1),...,(6x6)"."""


class NamedTower(NamedTuple):
    """A vision tower that configs name, and how its features are used."""

    vision_config: Mapping[str, Any]
    strategy: str  # vision_feature_select_strategy of Hugging Face's form: which tokens of the tower are features
    layer: int | None  # vision_feature_layer where the authors cut the tower off; None: as the config says
    picture_values: Mapping[str, Any]  # of preprocessor_config.json; {}: as the processor has them


class Form(NamedTuple):
    """A way to cut pictures, and the architecture that does so in Hugging Face's form."""

    architecture: str
    model_type: str
    processor: str
    merge_types: tuple[str | None, ...]  # mm_patch_merge_type that it stands for


TOWERS: dict[str, NamedTower] = {
    "openai/clip-vit-large-patch14-336": NamedTower(
        {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
        strategy="default",
        layer=None,
        picture_values={},
    ),
    "google/siglip-so400m-patch14-384": NamedTower(
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        strategy="full",
        layer=-1,
        picture_values={"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    ),
}
WHOLE: Final = Form("LlavaForConditionalGeneration", "llava", "LlavaImageProcessor", (None, "flat"))
TILES: Final = Form("LlavaNextForConditionalGeneration", "llava_next", "LlavaNextImageProcessor", ("spatial_unpad",))
REDUCED: Final = Form(
    "LlavaOnevisionForConditionalGeneration", "llava_onevision", "LlavaOnevisionImageProcessor", ("spatial_unpad",)
)


def translated(config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json, or its translation if it is one of these. Raises StartupError naming a key that differs."""
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if not isinstance(architecture, str) or architecture not in TEXT_TYPES:
        return config
    tower, form = _tower(config), _form(config)
    _refuse_other(config, "mm_projector_type", ("mlp2x_gelu",))
    _refuse_other(config, "mm_vision_select_feature", (None, "patch"))
    _refuse_other(config, "mm_patch_merge_type", form.merge_types)
    _refuse_other(config, "mm_use_im_start_end", (None, False))
    layer = config.get("mm_vision_select_layer", -2) if tower.layer is None else tower.layer
    kept = ("bos_token_id", "eos_token_id", "image_token_index", "video_token_index")
    return {
        "architectures": [form.architecture],
        "model_type": form.model_type,
        "text_config": {**config, "model_type": TEXT_TYPES[architecture]},
        "vision_config": dict(tower.vision_config),
        "vision_feature_layer": layer,
        "vision_feature_select_strategy": tower.strategy,
        "vision_aspect_ratio": config.get("image_aspect_ratio"),
        "image_grid_pinpoints": _grid(config.get("image_grid_pinpoints"), tower.vision_config["image_size"]),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        **{key: config[key] for key in kept if key in config},
    }


def preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    """Returns preprocessor_config.json for a config that `translated` made; {} for any other."""
    text = config.get("text_config")
    if not isinstance(text, dict) or "mm_vision_tower" not in text:
        return {}
    tower, form = _tower(text), _form(text)
    side = tower.vision_config["image_size"]
    square = {"height": side, "width": side}
    if form is REDUCED:
        return {"image_processor_type": form.processor, "size": square, **tower.picture_values}
    cropped = {"size": {"shortest_edge": side}, "crop_size": square, "do_pad": form is WHOLE}
    return {"image_processor_type": form.processor, **cropped, **tower.picture_values}


def _tower(config: Mapping[str, Any]) -> NamedTower:
    _refuse_other(config, "mm_vision_tower", tuple(TOWERS))
    return TOWERS[config["mm_vision_tower"]]


def _form(config: Mapping[str, Any]) -> Form:
    ratio = config.get("image_aspect_ratio")
    if isinstance(ratio, str) and ratio.startswith("anyres_max_"):
        return REDUCED
    _refuse_other(config, "image_aspect_ratio", ("pad", "anyres", "anyres_max_9"))
    return WHOLE if ratio == "pad" else TILES


def _refuse_other(config: Mapping[str, Any], key: str, known: tuple[Any, ...]) -> None:
    """Raises StartupError unless the value of the key is a known one."""
    if config.get(key) not in known:
        shown = " or ".join("none" if value is None else str(value) for value in known)
        architecture = config["architectures"][0]
        raise StartupError(
            f"config.json: {key}: {echo(config.get(key))} is not supported for {architecture}, only {shown}; {FIX}",
            field=key,
        )


def _grid(grid: Any, side: int) -> Any:
    """Returns the sizes that a picture may get as [height, width]: they are [width, height] there, or a span of tiles
    of `side` pixels."""
    span = SPAN.fullmatch(grid.replace(" ", "")) if isinstance(grid, str) else None
    if span is not None:
        first, _, last, _ = map(int, span.groups())
        return [[side * height, side * width] for height in range(first, last + 1) for width in range(first, last + 1)]
    if not isinstance(grid, list):
        return grid
    return [size[::-1] if isinstance(size, list) else size for size in grid]
