"""Tiny models that see, of which the text model alone is served; the oracle holds the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tiny_models import SHAPE, YARN, saved

EYE = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 4}
PIXTRAL_EYE = EYE | {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
MINISTRAL = {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}
LARGER = {
    "mistral-small": ("Mistral3", SHAPE | {"model_type": "mistral", "sliding_window": None}, PIXTRAL_EYE, {}),
    "ministral3": ("Mistral3", SHAPE | MINISTRAL, PIXTRAL_EYE, {"tie_word_embeddings": False}),
}


def write_larger(folder: Path, variant: str) -> torch.nn.Module:
    """Write config.json and model.safetensors; return the transformers model in float32."""
    family, text, vision, more = LARGER[variant]
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, **more)
    model = saved(folder, f"{family}ForConditionalGeneration", config, len(variant))
    model.config._attn_implementation = "eager"
    return model
