"""Tiny models with Pixtral's tower, written by transformers as folders; the oracle holds the same weights."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tiny_models import SHAPE, YARN, saved
from transformers.models.pixtral import image_processing_pil_pixtral

IMAGE, BREAK, END = 250, 251, 252
TEXT_IDS = {"[IMG_BREAK]": [BREAK], "[IMG_END]": [END]}
TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 4,
    "hidden_act": "silu",
}
MISTRAL = SHAPE | {"model_type": "mistral", "sliding_window": None}
MINISTRAL = SHAPE | {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
TYPE = {"image_processor_type": "PixtralImageProcessorFast"}


class Variant(NamedTuple):
    """merge: patches along the side of a token; preprocessor: as the folder has it."""

    family: str
    tower: dict
    text: dict
    changes: dict
    preprocessor: dict
    merge: int = 1


VARIANTS = {
    "mistral-small": Variant(
        "Mistral3", TOWER, MISTRAL, {}, {**TYPE, "size": {"longest_edge": 48}, "patch_size": 4}, 2
    ),
    "ministral3": Variant(
        "Mistral3",
        {**TOWER, "patch_size": 3, "hidden_act": "gelu", "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
        MINISTRAL | {"rms_norm_eps": 0.1},
        {"vision_feature_layer": -2, "spatial_merge_size": 3, "multimodal_projector_bias": True,
         "projector_hidden_act": "relu", "tie_word_embeddings": False},
        {**TYPE, "size": {"height": 27, "width": 40}, "patch_size": {"height": 9, "width": 9}, "resample": 2},
        3,
    ),
    "pixtral": Variant(
        "Llava", TOWER, MISTRAL, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {**TYPE, "size": {"longest_edge": 30}, "patch_size": {"height": 4, "width": 4}, **HALF},
    ),
    "pixtral-layers": Variant(
        "Llava", {**TOWER, "num_attention_heads": 2}, MISTRAL,
        {"vision_feature_layer": [0, -1], "vision_feature_select_strategy": "full", "multimodal_projector_bias": False},
        {**TYPE, "size": 40, "do_normalize": False, "rescale_factor": 0.01},
    ),
}  # fmt: skip
IN_GGUF = {
    "mistral-gguf": VARIANTS["mistral-small"]._replace(preprocessor={**TYPE, "size": {"longest_edge": 48}, **HALF}),
    "ministral3-gguf": Variant(
        "Mistral3", {**TOWER, "patch_size": 3, "hidden_act": "gelu"}, MINISTRAL | {"rms_norm_eps": 0.1},
        {"spatial_merge_size": 3, "multimodal_projector_bias": True, "tie_word_embeddings": False},
        {**TYPE, "size": {"longest_edge": 48}, **HALF}, 3,
    ),
    "pixtral-gguf": VARIANTS["pixtral"]._replace(preprocessor={**TYPE, "size": {"longest_edge": 48}, **HALF}),
}  # fmt: skip
"""Variants of which GGUF files say everything."""
SIZES = [(28, 28), (57, 31), (31, 57), (500, 333), (199, 400), (3, 2), (1, 1), (300, 20), (13, 260), (48, 49)]
"""Widths and heights: exact, odd, lying, standing, tiny, long."""


def write(folder: Path, variant: str) -> torch.nn.Module:
    """Writes the folder; returns the transformers model in float32."""
    family, tower, text, changes, preprocessor, _ = (VARIANTS | IN_GGUF)[variant]
    config = getattr(transformers, f"{family}Config")(
        vision_config=dict(tower), text_config=dict(text), image_token_index=IMAGE, **changes
    )
    model = saved(folder, f"{family}ForConditionalGeneration", config, len(variant))
    if variant == "ministral3":
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": preprocessor}))
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return model


def processor(variant: str):
    """The image processor of transformers with the patches that PixtralProcessor asks it for."""
    _, tower, _, _, preprocessor, merge = (VARIANTS | IN_GGUF)[variant]
    settings = {**preprocessor, "patch_size": tower["patch_size"] * merge}
    settings.pop("image_processor_type")
    return image_processing_pil_pixtral.PixtralImageProcessorPil(**settings)


@cache
def _processor_class():
    """PixtralProcessor, which imports an image processor that needs torchvision for the size alone."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    before = sys.modules.get(name)
    sys.modules[name] = image_processing_pil_pixtral
    try:
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
    return PixtralProcessor


def expanded(variant: str, height: int, width: int) -> list[int]:
    """What the processor of transformers puts in the place of a picture of that size, as the tower takes it."""
    oracle = object.__new__(_processor_class())
    oracle.patch_size, oracle.spatial_merge_size = VARIANTS[variant].tower["patch_size"], VARIANTS[variant].merge
    oracle.image_token, oracle.image_break_token, oracle.image_end_token = "\0", "\1", "\2"
    text = oracle.replace_image_token({"image_sizes": [(height, width)]}, 0)
    return [(IMAGE, BREAK, END)[ord(token)] for token in text]
