"""LLaVAs in the form that their authors publish load as their conversions do: tokens equal those of transformers."""

import json

import pytest
import tiny_llava
from llava_checks import Model, check_end_to_end, load_tiny_encoder
from runner_driver import folder_source
from safetensors.torch import load_file, save_file

from tureen.media.families import find_family
from tureen.weights import llava_original
from tureen.weights.source import model_config, preprocessor_config

ORIGINALS = {
    "llava-clip": ("LlavaLlamaForCausalLM", "openai/clip-vit-large-patch14-336", {"image_aspect_ratio": "pad"}),
    "next-vicuna": (
        "LlavaLlamaForCausalLM",
        "openai/clip-vit-large-patch14-336",
        {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"},
    ),
    "next-mistral": (
        "LlavaMistralForCausalLM",
        "openai/clip-vit-large-patch14-336",
        {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"},
    ),
    "onevision": (
        "LlavaQwenForCausalLM",
        "google/siglip-so400m-patch14-384",
        {
            "image_aspect_ratio": "anyres_max_3",
            "mm_patch_merge_type": "spatial_unpad",
            "video_token_index": tiny_llava.VIDEO,
        },
    ),
}
"""Variant of tiny_llava -> the authors' architecture, tower and settings for the same model."""

PARTS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.", "model.vision_tower.vision_tower.vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("multi_modal_projector.linear_1.", "model.mm_projector.0."),
    ("multi_modal_projector.linear_2.", "model.mm_projector.2."),
)


def _authors_name(name: str) -> str:
    for prefix, replacement in PARTS:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return "model.image_newline" if name == "image_newline" else name


def _rewrite(folder, variant):
    """Rewrites a folder of transformers in the authors' form."""
    architecture, tower, settings = ORIGINALS[variant]
    converted = json.loads((folder / "config.json").read_text())
    text = converted["text_config"]
    text.pop("architectures", None)
    grid = [size[::-1] for size in converted.get("image_grid_pinpoints") or []]
    config = {
        **text,
        "architectures": [architecture],
        "model_type": "llava",
        "mm_vision_tower": tower,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_use_im_start_end": False,
        "image_token_index": tiny_llava.IMAGE,
        "image_grid_pinpoints": grid or None,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").unlink()
    weights = load_file(folder / "model.safetensors")
    save_file({_authors_name(name): weight for name, weight in weights.items()}, folder / "model.safetensors")


@pytest.fixture(params=ORIGINALS)
def model(request, tmp_path, monkeypatch):
    variant = request.param
    oracle = tiny_llava.write(tmp_path, variant)
    vision = {**json.loads((tmp_path / "config.json").read_text())["vision_config"]}
    name = ORIGINALS[variant][1]
    tower = llava_original.TOWERS[name]._replace(vision_config=vision, picture_values={})
    monkeypatch.setitem(llava_original.TOWERS, name, tower)
    _rewrite(tmp_path, variant)
    source = folder_source(tmp_path)
    family = find_family(model_config(source), preprocessor_config(source))
    return Model(tmp_path, oracle, variant, load_tiny_encoder(tmp_path), family)


def test_tokens_after_a_square_picture_equal_transformers(model):
    check_end_to_end(model, [tiny_llava.picture(56, 56)], "image")


@pytest.mark.parametrize("model", [name for name in ORIGINALS if name != "llava-clip"], indirect=True)
def test_tokens_after_a_picture_in_tiles_equal_transformers(model):
    check_end_to_end(model, [tiny_llava.picture(57, 31)], "image")


def test_a_grid_that_is_written_as_a_span_has_each_number_of_tiles_both_ways():
    config = {
        "architectures": ["LlavaQwenForCausalLM"],
        "mm_vision_tower": "google/siglip-so400m-patch14-384",
        "mm_projector_type": "mlp2x_gelu",
        "image_grid_pinpoints": "(1x1),...,(2x2)",
        **ORIGINALS["onevision"][2],
    }
    grid = llava_original.translated(config)["image_grid_pinpoints"]
    assert grid == [[384, 384], [384, 768], [768, 384], [768, 768]]
