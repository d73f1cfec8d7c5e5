"""Tiny models that see, with random weights, written by transformers as folders; the oracle holds the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_models import SHAPE, saved
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tureen.text.tokenizer import BYTE_OF_CHAR

TILE = 28  # pixels
GRID = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
LARGE_GRID = [[height, width] for height in (28, 56, 84, 112) for width in (28, 56, 84, 112)]
IMAGE, VIDEO = 250, 251  # token ids
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": TILE,
    "patch_size": 7,
}
SIGLIP = {**CLIP, "vision_use_head": False}
DINOV2 = {**{key: value for key, value in CLIP.items() if key != "intermediate_size"}, "mlp_ratio": 2, "image_size": 42}
MISTRAL = {"sliding_window": None}
VARIANTS = {
    "llava-clip": ("Llava", "CLIPVision", CLIP, "Llama", {}),
    "llava-clip-layers": (
        "Llava", "CLIPVision", CLIP, "Llama",
        {"vision_feature_layer": [0, -2, -1], "vision_feature_select_strategy": "full", "projector_hidden_act": "relu",
         "multimodal_projector_bias": False},
    ),
    "llava-siglip": ("Llava", "SiglipVision", SIGLIP, "Qwen2", {"vision_feature_select_strategy": "full"}),
    "llava-dinov2": ("Llava", "Dinov2", DINOV2, "Llama", {}),
    "llava-dinov2-gated": ("Llava", "Dinov2", {**DINOV2, "use_swiglu_ffn": True, "qkv_bias": False}, "Llama", {}),
    "next-vicuna": ("LlavaNext", "CLIPVision", CLIP, "Llama", {"image_grid_pinpoints": GRID}),
    "next-mistral": ("LlavaNext", "CLIPVision", CLIP, "Mistral", {"image_grid_pinpoints": GRID}),
    "onevision": (
        "LlavaOnevision", "SiglipVision", SIGLIP, "Qwen2",
        {"image_grid_pinpoints": LARGE_GRID, "vision_aspect_ratio": "anyres_max_3", "video_token_index": VIDEO},
    ),
}  # fmt: skip
CROPPED = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
SQUARE = {"size": {"height": TILE, "width": TILE}}
PREPROCESSORS = {
    "llava-clip": {"image_processor_type": "CLIPImageProcessor", **CROPPED},
    "llava-clip-layers": {"image_processor_type": "LlavaImageProcessor", **CROPPED, "do_pad": True},
    "llava-siglip": {"image_processor_type": "SiglipImageProcessor", **SQUARE},
    "llava-dinov2": {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 40},
        "crop_size": {"height": 28, "width": 35},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "llava-dinov2-gated": {"image_processor_type": "BitImageProcessor", **SQUARE, "do_center_crop": False},
    "next-vicuna": {"image_processor_type": "LlavaNextImageProcessor", **CROPPED, "image_grid_pinpoints": GRID},
    "next-mistral": {"image_processor_type": "LlavaNextImageProcessor", **CROPPED, "image_grid_pinpoints": GRID},
    "onevision": {"image_processor_type": "LlavaOnevisionImageProcessor", **SQUARE, "image_grid_pinpoints": LARGE_GRID},
}
SIZES = [(28, 28), (57, 31), (31, 57), (500, 333), (199, 400), (3, 2), (1, 1), (300, 20), (13, 260), (113, 112)]
"""Widths and heights: exact, odd, lying, standing, tiny, long."""


def write(folder: Path, variant: str) -> torch.nn.Module:
    """Writes the folder; returns the transformers model in float32, as loaded from it."""
    family, tower, shape, text, changes = VARIANTS[variant]
    text_config = {**SHAPE, **(MISTRAL if text == "Mistral" else {})}
    config = getattr(transformers, f"{family}Config")(
        vision_config=getattr(transformers, f"{tower}Config")(**shape),
        text_config=getattr(transformers, f"{text}Config")(**text_config),
        image_token_index=IMAGE,
        **changes,
    )
    model = saved(folder, f"{family}ForConditionalGeneration", config, len(variant))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[variant]))
    return model


def write_tokenizer(folder: Path) -> None:
    """ASCII characters and the placeholders, each a token."""
    characters = [char for char, byte in BYTE_OF_CHAR.items() if byte < 128]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{char: 3 + index for index, char in enumerate(characters)}}
    backend = Tokenizer(models.BPE(vocab=vocab | {"<image>": IMAGE, "<video>": VIDEO}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<pad>", "<s>", "</s>", "<image>", "<video>")]
    )
    backend.save(str(folder / "tokenizer.json"))


def processor(variant: str):
    """The image processor of transformers that the folder names."""
    settings = dict(PREPROCESSORS[variant])
    return getattr(transformers, settings.pop("image_processor_type") + "Pil")(**settings)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours and some noise."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + 3 * channel) + seed) * np.cos(y / (5 + 2 * channel)) for channel in range(3)]
    noise = generator.normal(0, 25, (height, width, 3))
    return Image.fromarray(np.clip(128 + 90 * np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8))
