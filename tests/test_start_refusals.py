"""A server that cannot start says why in one line, with the fix: here without a process of its own."""

from __future__ import annotations

import json

import pytest
from tiny_gguf import architecture_metadata, write_gguf

from tureen.__main__ import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
VOCAB = {chr(33 + i): i for i in range(90)}
TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": VOCAB, "merges": []}, "added_tokens": []}
MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}


@pytest.mark.parametrize(
    ("config", "weights", "named"),
    [
        (LLAMA, b"\xff" * 100, ["model.safetensors"]),
        (MAMBA, b"", ["MambaForCausalLM", "LlamaForCausalLM"]),
    ],
    ids=["corrupt safetensors", "an unknown architecture"],
)
def test_a_model_that_cannot_be_served_is_named_with_what_can(tmp_path, capsys, monkeypatch, config, weights, named):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert all(word in refusal(capsys, monkeypatch, "--model-path", str(tmp_path)) for word in named)


def test_an_architecture_is_judged_before_the_tokenizer(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(MAMBA))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "'MambaForCausalLM' is not supported" in refusal(capsys, monkeypatch, "--model-path", str(tmp_path))
    unknown = {"tokenizer.ggml.model": "of tomorrow", "tokenizer.ggml.tokens": ["a"]}
    path = write_gguf(tmp_path / "m.gguf", architecture_metadata("jamba") | unknown)
    assert "'jamba' is not supported" in refusal(capsys, monkeypatch, "--model-path", str(path))


def test_a_kv_cache_that_does_not_fit_is_refused_with_the_flag_to_change(default_model_source, capsys, monkeypatch):
    assert "--max-total-tokens" in refusal(capsys, monkeypatch, "--max-total-tokens", str(10**9), "--engine", "thread")


def refusal(capsys, monkeypatch, *flags: str) -> str:
    """Returns the line in which a start fails."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["serve", "--port", "0", *flags]) == 1
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    [line] = [line for line in printed.err.splitlines() if line.startswith("tureen: ")]
    return line
