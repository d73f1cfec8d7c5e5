"""A server that cannot start says why in one line, with the fix, and exits with status 1."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.e2e


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tureen", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def write_tokenizer(folder: Path) -> None:
    vocab = {chr(33 + i): i for i in range(90)}
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def fault_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tureen: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_a_port_in_use_is_named_with_a_free_one():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fault_line(run("--port", str(port)))
    assert str(port) in line
    assert "--port" in line


def test_a_missing_model_is_named(tmp_path):
    assert "no-such-model" in fault_line(run("--model-path", str(tmp_path / "no-such-model"), "--port", "0"))


def test_a_corrupt_gguf_file_is_named(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 64)
    assert "broken.gguf" in fault_line(run("--model-path", str(path), "--port", "0"))


def test_corrupt_safetensors_are_named(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 256, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    write_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "model.safetensors" in fault_line(run("--model-path", str(tmp_path), "--port", "0"))


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    write_tokenizer(tmp_path)
    line = fault_line(run("--model-path", str(tmp_path), "--port", "0"))
    assert "MambaForCausalLM" in line
    assert "LlamaForCausalLM" in line


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_kv_cache_that_does_not_fit_is_refused_with_the_flag_to_change(default_model_source, engine):
    line = fault_line(run("--max-total-tokens", str(10**9), "--port", "0", "--engine", engine))
    assert "--max-total-tokens" in line


def test_a_setting_out_of_range_is_named():
    assert "--page-size" in fault_line(run("--page-size", "0"))


def test_a_mistyped_flag_gets_a_suggestion():
    done = run("--max-totl-tokens", "5")
    assert done.returncode == 2
    assert "--max-total-tokens" in done.stderr
