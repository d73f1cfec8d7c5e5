"""Tiny models of Gemma 3 that see, as tiny_llava.py has them, and a tokenizer for their texts."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_idefics3
import torch
import transformers
from tiny_models import GEMMA, SHAPE, saved

from tureen.text.tokenizer import Tokenizer

IMAGE, START, END = 250, 251, 252  # token ids
SPECIAL = {"<image_soft_token>": IMAGE, "<start_of_image>": START, "<end_of_image>": END}
MOST_NEWLINES = 4  # in one token
TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
    "layer_norm_eps": 1e-3,
    "vision_use_head": False,
}
TEXT = SHAPE | GEMMA | {"model_type": "gemma3_text"}
TOKENS = {"boi_token_index": START, "eoi_token_index": END, "image_token_index": IMAGE}
VARIANTS = {
    "gemma3": (TOWER, TEXT, {"mm_tokens_per_image": 9}),  # fewer tokens than the window
    "gemma3-long": (TOWER | {"patch_size": 3}, TEXT, {"mm_tokens_per_image": 16}),  # more
    "gemma3-alone": (TOWER | {"image_size": 26, "patch_size": 5}, TEXT, {"mm_tokens_per_image": 25}),
}


def write(folder: Path, variant: str) -> torch.nn.Module:
    """Writes the folder; returns the transformers model in float32, as loaded from it."""
    tower, text, changes = VARIANTS[variant]
    config = transformers.Gemma3Config(vision_config=tower, text_config=text, **TOKENS, **changes)
    model = saved(folder, "Gemma3ForConditionalGeneration", config, len(variant))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor(variant)))
    return model


def preprocessor(variant: str) -> dict:
    """preprocessor_config.json, with the keys of published ones."""
    side = VARIANTS[variant][0]["image_size"]
    return {
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": 256,
        "pan_and_scan_min_crop_size": None,
        "processor_class": "Gemma3Processor",
        "resample": 2,
        "size": {"height": side, "width": side},
    }


def backend():
    """Characters, runs of newlines, and the tokens around pictures."""
    return tiny_idefics3.backend(SPECIAL, MOST_NEWLINES)


def tokenizer() -> Tokenizer:
    """The tokenizer as the server has it."""
    return Tokenizer(backend(), eos_token_ids=(2,), bos_token_id=1)


def processor(variant: str):
    """The processor of transformers for texts with pictures."""
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(), extra_special_tokens=names)
    settings = {key: value for key, value in preprocessor(variant).items() if value is not None}
    settings.pop("image_processor_type")
    num_tokens = VARIANTS[variant][2]["mm_tokens_per_image"]
    pixels = transformers.Gemma3ImageProcessorPil(**settings)
    return transformers.Gemma3Processor(pixels, fast, image_seq_length=num_tokens)
