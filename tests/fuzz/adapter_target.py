"""An adapter that somebody made: up to the first NUL its config, then its weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tureen.lora.adapter import CONFIG, WEIGHTS, read_adapter
from tureen.runner.loading import describe

MODEL = describe(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
    }
)


def run(data: bytes) -> None:
    config, _, weights = data.partition(b"\0")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / CONFIG).write_bytes(config)
        (Path(name) / WEIGHTS).write_bytes(weights)
        read_adapter(name, MODEL)
