"""Reads LLaVA-1.6 as its authors publish it: makes the config that the same model has in Hugging Face's form."""

from __future__ import annotations

from typing import Any, Final

from tureen.errors import StartupError, echo

TEXT_TYPES: Final = {"LlavaLlamaForCausalLM": "llama", "LlavaMistralForCausalLM": "mistral"}
WANTED: Final = {
    "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    "mm_projector_type": "mlp2x_gelu",
    "image_aspect_ratio": "anyres",
    "mm_patch_merge_type": "spatial_unpad",
    "mm_vision_select_feature": "patch",
}
IMAGE_SIZE: Final = 336  # the tower's
FIX: Final = "use the conversion of this model whose name begins with llava-hf/"


def translated(config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json, or its translation if it is one of these. Raises StartupError naming a key that differs."""
    architecture = (config.get("architectures") or [""])[0]
    if architecture not in TEXT_TYPES:
        return config
    for key, value in WANTED.items():
        if config.get(key) != value:
            raise StartupError(
                f"config.json: {key}: {echo(config.get(key))} is not supported of {architecture}, only {value}; {FIX}",
                field=key,
            )
    if config.get("mm_use_im_start_end"):
        raise StartupError(
            f"config.json: mm_use_im_start_end: true is not supported; {FIX}", field="mm_use_im_start_end"
        )
    return {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "text_config": {**config, "model_type": TEXT_TYPES[architecture]},
        "vision_feature_layer": config.get("mm_vision_select_layer", -2),
        "image_grid_pinpoints": _transposed(config.get("image_grid_pinpoints")),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
    }


def preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    """Returns preprocessor_config.json for a config that `translated` made; {} for any other."""
    text = config.get("text_config")
    if not isinstance(text, dict) or "mm_vision_tower" not in text:
        return {}
    return {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": IMAGE_SIZE},
        "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    }


def _transposed(grid: Any) -> Any:
    """Swaps the sizes of a grid: they are [width, height] there."""
    if not isinstance(grid, list):
        return grid
    return [size[::-1] if isinstance(size, list) else size for size in grid]
