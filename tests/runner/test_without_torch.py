"""What the native CPU engine needs around its kernels works where torch is never imported."""

from __future__ import annotations

import subprocess
import sys

import tiny_gguf
import tiny_models

SCRIPT = """
import sys
from pathlib import Path
from tureen.build import find_model
from tureen.config import Config
from tureen.devices.base import resolve_device
from tureen.log import no_progress
from tureen.runner import loading
from tureen.runner.kv_pool import plan_capacity
from tureen.weights.source import model_config
from tureen.weights.stored import to_float32

config = Config(model_path=sys.argv[1], device="cpu", context_length=64, max_total_tokens=64)
source = find_model(config).source
hf = model_config(source)
shape = loading.describe(hf)
weights = loading.weights(source, hf, shape, load_format="auto", progress=no_progress)
assert {one.name: to_float32(one).shape for one in weights} == shape.weights()
device = resolve_device("cpu")
loading.require_memory(1 << 16, "auto", device)
assert plan_capacity(config, shape, token_bytes=64, weight_bytes=1 << 16, device=device).num_pages == 4
assert "torch" not in sys.modules
print("done")
"""


def test_a_model_is_found_described_and_read_without_torch(tmp_path):
    model = tiny_models.write(tmp_path / "hf", "llama")
    path = tiny_gguf.write_from_transformers(tmp_path / "m.gguf", model)
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("done\n", "")
