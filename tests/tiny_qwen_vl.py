"""Tiny Qwens that see, with random weights, written by transformers as folders; the oracle holds the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tiny_models import QWEN_LINEAR, QWEN_LINEAR_MOE, SHAPE, saved

IMAGE = 250
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
    "tie_word_embeddings": False,
}
EYE = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}
SQUARES = EYE | {"num_position_embeddings": 36}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = SHAPE | QWEN_LINEAR
LINEAR["rope_parameters"] = ROPE | {
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
DEEP = SHAPE | {"num_hidden_layers": 3, "head_dim": 32}
DEEP["rope_parameters"] = ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
VARIANTS = {
    "qwen2": (
        "Qwen2VL",
        SHAPE | {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
        {key: value for key, value in EYE.items() if key not in ("intermediate_size", "out_hidden_size")}
        | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3},
    ),
    "qwen2.5": (
        "Qwen2_5_VL",
        SHAPE | {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
        EYE | {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3.5": ("Qwen3_5", LINEAR, SQUARES),
    "qwen3": ("Qwen3VL", DEEP, SQUARES | {"deepstack_visual_indexes": [2, 0]}),
    "qwen3-moe": (
        "Qwen3VLMoe",
        DEEP | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
        SQUARES | {"deepstack_visual_indexes": [1]},
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", LINEAR | QWEN_LINEAR_MOE, SQUARES),
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.25, 0.2],
}
SIZES = [(32, 32), (57, 31), (31, 57), (500, 333), (3, 2), (1, 1), (300, 20), (13, 260), (113, 112), (40, 44)]
"""Widths and heights: exact, odd, lying, standing, tiny, long, halfway between two sizes."""


def write(folder: Path, variant: str) -> torch.nn.Module:
    """Writes the folder; returns the transformers model in float32, as loaded from it."""
    family, text, vision = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, **TOKENS)
    model = saved(folder, f"{family}ForConditionalGeneration", config, sum(map(ord, variant)))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return model


def processor():
    """The image processor of transformers that the folder names."""
    settings = {key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"}
    return transformers.Qwen2VLImageProcessorPil(**settings)
