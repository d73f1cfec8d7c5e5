"""Architectures of GGUF files that are not read, and their classes in config.json."""

from __future__ import annotations

from typing import Final

CLASSES: Final = {
    "afmoe": "AfmoeForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "bloom": "BloomForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "exaone-moe": "ExaoneMoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "jamba": "JambaForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "phi2": "PhiForCausalLM",
    "stablelm": "StableLmForCausalLM",
}
