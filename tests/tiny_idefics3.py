"""Tiny Idefics3 and SmolVLM models with random weights, as tiny_llava.py has them, and a tokenizer for their texts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tiny_models import SHAPE, saved
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tureen.text.tokenizer import BYTE_OF_CHAR, Tokenizer

IMAGE = 250  # token id
EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VARIANTS = {
    "smolvlm": ("SmolVLM", {**EYE, "image_size": 28, "patch_size": 7}, {"scale_factor": 2}),
    "smolvlm-stretched": ("SmolVLM", {**EYE, "image_size": 30, "patch_size": 7}, {"scale_factor": 4}),
    "idefics3": (
        "Idefics3",
        {**EYE, "image_size": 75, "patch_size": 3, "hidden_act": "gelu"},  # 25 patches: not all have their own position
        {"scale_factor": 5, "tie_word_embeddings": True},
    ),
    "idefics3-whole": ("Idefics3", {**EYE, "image_size": 20, "patch_size": 5}, {"scale_factor": 1}),
}
IN_GGUF = {
    "idefics3-gguf": ("Idefics3", {**EYE, "image_size": 75, "patch_size": 3}, VARIANTS["idefics3"][2]),
}
"""Variants of which GGUF files say everything."""
SMOLVLM, IDEFICS3 = ({"image_processor_type": f"{name}ImageProcessor"} for name in ("SmolVLM", "Idefics3"))
PREPROCESSORS = {
    "smolvlm": {**SMOLVLM, "size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}},
    "smolvlm-stretched": {
        **SMOLVLM,
        "size": {"height": 50, "width": 71},
        "max_image_size": {"longest_edge": 30},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "resample": 2,
    },
    "idefics3": {**IDEFICS3, "size": {"longest_edge": 149}, "max_image_size": {"longest_edge": 75}},
    "idefics3-gguf": {**IDEFICS3, "size": {"longest_edge": 149}, "max_image_size": {"longest_edge": 75}},
    "idefics3-whole": {
        **IDEFICS3,
        "size": {"longest_edge": 65},
        "max_image_size": {"longest_edge": 20},
        "do_image_splitting": False,
    },
}
SPECIAL = {
    "<image>": IMAGE,
    "<fake_token_around_image>": 251,
    "<global-img>": 252,
    "<row_1_col_1>": 253,  # the others are text, as in Idefics3's own tokenizer
    "<end_of_utterance>": 254,
}


def write(folder: Path, variant: str) -> torch.nn.Module:
    """Writes the folder; returns the transformers model in float32, as loaded from it."""
    family, eye, changes = (VARIANTS | IN_GGUF)[variant]
    config = getattr(transformers, f"{family}Config")(
        vision_config=eye, text_config={**SHAPE, "model_type": "llama"}, image_token_id=IMAGE, **changes
    )
    model = saved(folder, f"{family}ForConditionalGeneration", config, len(variant))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[variant]))
    return model


def backend(special: dict[str, int] = SPECIAL, most_newlines: int = 2) -> Backend:
    """ASCII characters, several newlines in one token, and special tokens."""
    characters = [char for char, byte in BYTE_OF_CHAR.items() if byte < 128]
    [newline] = (char for char, byte in BYTE_OF_CHAR.items() if byte == ord("\n"))
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{char: 3 + index for index, char in enumerate(characters)}}
    vocab |= {newline * count: len(characters) + 1 + count for count in range(2, most_newlines + 1)} | special
    merges = [(newline * count, newline) for count in range(1, most_newlines)]
    made = Backend(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


def tokenizer() -> Tokenizer:
    """The tokenizer as the server has it."""
    return Tokenizer(backend(), eos_token_ids=(2,), bos_token_id=1)


def image_processor(variant: str, **changes):
    """The image processor of transformers that the folder names."""
    settings = PREPROCESSORS[variant] | changes
    return getattr(transformers, settings.pop("image_processor_type") + "Pil")(**settings)


def processor(variant: str, num_tokens: int):
    """The processor of transformers for texts with pictures; SmolVLM's own makes the same of them but needs a package
    for videos. num_tokens: of a tile."""
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend())
    return transformers.Idefics3Processor(image_processor(variant), fast, image_seq_len=num_tokens)
