"""What the native CPU engine needs around its kernels works where torch is never imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
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


BUILT_IN = """
import sys
import numpy as np
from tureen.contract.params import SamplingParams
from tureen.contract.runner import SlotState
from tureen.kernels.cpu import native
from tureen.sampling.custom import CustomProcessors, load_registered
from tureen.sampling.native_arithmetic import NativeArithmetic

arithmetic = NativeArithmetic(native.load().Pool(1))
processors = CustomProcessors(load_registered(()))
logits = arithmetic.prepare(np.zeros((3, 50), dtype=np.float32))
rows = [("disallowed_tokens", {"token_ids": [3, 4]}), ("no_repeat_ngram", {"ngram_size": 2}), ("disallowed_tokens", {})]
states = [
    processors.start(
        SlotState(slot, SamplingParams(custom_params=params), 0, (1, 2), (7, 8, 7), (), None, processor=name)
    )
    for slot, (name, params) in enumerate(rows)
]
failures = processors.apply(arithmetic, logits, arithmetic.peaks(logits), states)
assert [list(map(int, np.flatnonzero(row == -np.inf))) for row in logits] == [[3, 4], [8], []]
assert list(failures) == [2] and failures[2].status == 400
assert "torch" not in sys.modules
print("done")
"""


def test_a_built_in_logit_processor_keeps_no_step_waiting_for_torch():
    pytest.importorskip("tureen.kernels.cpu._native", reason="the native kernels are not built")
    ran = subprocess.run([sys.executable, "-c", BUILT_IN], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("done\n", "")


def test_an_operators_logit_processor_has_torch_imported_before_the_first_step():
    lines = (
        "import sys; from tureen.sampling.custom import load_registered; assert 'torch' not in sys.modules",
        "load_registered(['mine=tureen.sampling.built_in:DisallowedTokens']); assert 'torch' in sys.modules",
    )
    ran = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("", "")
