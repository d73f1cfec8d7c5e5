"""What the native CPU engine needs around its kernels works where torch is never imported."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tiny_gguf
import tiny_models

GUARDS = ("grammar", "kernels", "runner", "sampling", "vision", "weights")

SCRIPT = """
import sys
from pathlib import Path
from tureen.build import find_model
from tureen.config import Config
from tureen.devices.base import resolve_device
from tureen.log import no_progress
from tureen.runner import loading
from tureen.runner.kv_pool import KvBytes, plan_capacity
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
assert plan_capacity(config, shape, kv_bytes=KvBytes(64), weight_bytes=1 << 16, device=device).num_pages == 4
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


def test_a_text_model_is_loaded_without_torch(tmp_path):
    tiny_models.write(tmp_path, "llama")
    code = (
        "import sys; from pathlib import Path; from tureen.runner.load import load_runner;"
        "from tureen.config import Config; from tureen.weights.source import ModelSource;"
        f"source = ModelSource('m', Path({str(tmp_path)!r}), 'safetensors');"
        "load_runner(source, Config(device='cpu', max_total_tokens=64));"
        "assert 'torch' not in sys.modules and 'tureen.runner.encoder' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_constraints_are_compiled_without_torch():
    code = (
        "import sys; from tureen.grammar import LanguageCompiler, Vocabulary; from tureen.kernels.cpu import native\n"
        "LanguageCompiler(Vocabulary((b'a', b''), (1,), 2), lambda text: [], native.require());"
        "assert not {'torch', 'transformers', 'asyncio'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


WITHOUT_TORCH = """
import sys
import numpy as np
from tureen.kernels.cpu import _native as native
from tureen.logit_processor import CustomLogitProcessor
from tureen.sampling.processor_pool import ProcessorPool
from tureen.contract.runner import SlotState
from tureen.sampling.custom import CustomProcessors, load_registered
from tureen.sampling.native_arithmetic import NativeArithmetic
from tureen.contract.params import SamplingParams
from tureen.sampling.sampler import Sampler
from tureen.contract.types import LogprobSpec

class Mine(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        logits[:, 9] += 100.0
        return logits

def state(slot, processor="", logprobs=None, **params):
    return SlotState(slot, SamplingParams(**params), 0, (1, 2), (), (3,), logprobs, processor)

custom = CustomProcessors(load_registered(()), ProcessorPool(4, 64) if sys.argv[1] == "code" else None)
if custom.pool is not None:
    custom.pool.acquire("", Mine.to_str()).is_settled.wait()
sampler = Sampler(4, 64, NativeArithmetic(native.Pool(2)), custom)
sampler.set_slot(state(0, temperature=0.0))
sampler.set_slot(state(1, top_p=0.9, frequency_penalty=1.0, min_new_tokens=2, logprobs=LogprobSpec(top=3, mode="raw")))
sampler.set_slot(state(2, logprobs=LogprobSpec(top=3, token_ids=(5,))))
chosen = {"code": Mine.to_str(), "none": "", "built-in": "disallowed_tokens"}[sys.argv[1]]
sampler.set_slot(state(3, chosen, temperature=0.0, custom_params={"token_ids": [5]}))
logits = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
logits[3, 5] = 50.0
outputs = sampler.sample(logits.copy(), range(4), [2] * 4, {0: np.array([6, 0], dtype=np.uint32)})
sampler.score(logits, 2, [1, 2, 3, 4], 1)
sampler.close()
assert all(output.error is None for output in outputs), outputs
print(outputs[3].token_id, "torch" in sys.modules)
"""


@pytest.mark.parametrize("processor", ["none", "code", "built-in"])
def test_torch_is_imported_for_no_processor_of_a_client_s_and_none_that_is_built_in(processor):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, processor], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    others = np.random.default_rng(0).normal(size=(4, 64))[3]
    others[5] = -np.inf
    expected = {"none": 5, "code": 9, "built-in": int(others.argmax())}
    assert done.stdout.split() == [str(expected[processor]), "False"]
