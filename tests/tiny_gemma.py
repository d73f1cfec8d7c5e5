"""Tiny models of Gemma 3 and 4 that see, as tiny_llava.py has them, and tokenizers for their texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import tiny_idefics3
import torch
import transformers
from tiny_models import GEMMA, GEMMA4, GEMMA4_SHARED, SHAPE, saved

from tureen.text.tokenizer import Tokenizer

IMAGE, START, END = 250, 251, 252  # token ids
TOKENS3 = {"boi_token_index": START, "eoi_token_index": END, "image_token_index": IMAGE}
TOKENS4 = {"boi_token_id": START, "eoi_token_id": END, "image_token_id": IMAGE}
TOKENS4 |= {"video_token_id": 253, "audio_token_id": 254, "boa_token_id": 248, "eoa_token_index": 249}
MOST_NEWLINES = 4  # in one token
TOWER3 = {
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
TOWER4 = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 3,
    "pooling_kernel_size": 2,
    "position_embedding_size": 140,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
}
TEXT3 = SHAPE | GEMMA | {"model_type": "gemma3_text", "query_pre_attn_scalar": 32}  # the head size, as in GGUF files


class Variant(NamedTuple):
    family: str
    tower: dict
    text: dict
    changes: dict


VARIANTS = {
    "gemma3": Variant("Gemma3", TOWER3, TEXT3, {"mm_tokens_per_image": 9}),  # fewer tokens than the window
    "gemma3-long": Variant("Gemma3", TOWER3 | {"patch_size": 3}, TEXT3, {"mm_tokens_per_image": 16}),  # more
    "gemma3-alone": Variant("Gemma3", TOWER3 | {"image_size": 26, "patch_size": 5}, TEXT3, {"mm_tokens_per_image": 25}),
    "gemma4-causal": Variant("Gemma4", TOWER4 | {"use_clipped_linears": True}, SHAPE | GEMMA4_SHARED, {}),
    "gemma4": Variant(
        "Gemma4",
        TOWER4 | {"standardize": True, "patch_size": 2, "pooling_kernel_size": 3, "position_embedding_size": 210},
        SHAPE | GEMMA4 | {"use_bidirectional_attention": "vision"},
        {},
    ),
}
# Files do not say the base of frequencies, and the most tokens: these are as published.
OF_GGUF = {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}, "position_embedding_size": 850}
IN_GGUF = {
    f"{name}-gguf": own._replace(
        tower=own.tower | OF_GGUF | {"hidden_size": 32}, text=own.text | {"max_position_embeddings": 1024}
    )
    for name, own in VARIANTS.items()
    if own.family == "Gemma4"
}


def special(variant: str) -> dict[str, int]:
    """The tokens of a picture and around it."""
    if variant.startswith("gemma3"):
        return {"<image_soft_token>": IMAGE, "<start_of_image>": START, "<end_of_image>": END}
    return {"<|image|>": IMAGE, "<|image>": START, "<image|>": END}


def write(folder: Path, variant: str) -> torch.nn.Module:
    """Writes the folder; returns the transformers model in float32, as loaded from it."""
    family, tower, text, changes = (VARIANTS | IN_GGUF)[variant]
    tokens = TOKENS3 if family == "Gemma3" else TOKENS4
    apart = {"tie_word_embeddings": False}  # with one matrix for both, every token would follow itself
    config = getattr(transformers, f"{family}Config")(
        vision_config=tower, text_config=text | apart, **apart, **tokens, **changes
    )
    model = saved(folder, f"{family}ForConditionalGeneration", config, len(variant))
    if family == "Gemma3":
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor(variant)))
    else:  # as the published ones are
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": preprocessor(variant)}))
    return model


def preprocessor(variant: str) -> dict:
    """preprocessor_config.json, with the keys of published ones."""
    family, tower, _, _ = (VARIANTS | IN_GGUF)[variant]
    if family == "Gemma4":
        tinted = variant == "gemma4-causal-gguf"
        return {
            "do_convert_rgb": True,
            "do_normalize": tinted,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.1, 0.2, 0.3] if tinted else [0.0, 0.0, 0.0],
            "image_processor_type": "Gemma4ImageProcessor",
            "image_seq_length": 280,
            "image_std": [0.9, 0.8, 0.7] if tinted else [1.0, 1.0, 1.0],
            "max_soft_tokens": 280 if variant in IN_GGUF else 70,
            "patch_size": tower["patch_size"],
            "pooling_kernel_size": tower["pooling_kernel_size"],
            "resample": 3,
            "rescale_factor": 1 / 255,
        }
    side = tower["image_size"]
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


def backend(variant: str):
    """Characters, runs of newlines, and the tokens around pictures."""
    return tiny_idefics3.backend(special(variant), MOST_NEWLINES)


def tokenizer(variant: str) -> Tokenizer:
    """The tokenizer as the server has it."""
    return Tokenizer(backend(variant), eos_token_ids=(2,), bos_token_id=1)


def image_processor(variant: str, **changes):
    """The image processor of transformers that the folder names."""
    settings = {key: value for key, value in preprocessor(variant).items() if value is not None} | changes
    return getattr(transformers, settings.pop("image_processor_type") + "Pil")(**settings)


def inputs(variant: str, text: str, pictures: list) -> dict:
    """What transformers makes of a text and its pictures: arguments of its model."""
    image, start, end = special(variant)
    names = {"boi_token": start, "eoi_token": end, "image_token": image}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(variant), extra_special_tokens=names)
    if variant.startswith("gemma3"):
        num_tokens = VARIANTS[variant].changes["mm_tokens_per_image"]
        processor = transformers.Gemma3Processor(image_processor(variant), fast, image_seq_length=num_tokens)
        made = processor(text=text, images=pictures, return_tensors="pt", do_pan_and_scan=False)
        made.pop("attention_mask")
        return dict(made)
    made = dict(image_processor(variant)(pictures, return_tensors="pt"))  # its processor needs packages for videos
    for count in made.pop("num_soft_tokens_per_image"):
        text = text.replace(image, f"{start}{'@' * int(count)}{end}", 1)
    ids = fast(text.replace("@", image), return_tensors="pt").input_ids
    return made | {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}
