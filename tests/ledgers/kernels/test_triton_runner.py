"""A model with Triton's attention, norms and activations, in the interpreter: plain steps, and captured ones."""

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  before the kernels
from captured_tape import Tape
from launches import operations
from runner_driver import Running, folder_source, random_tokens, step
from tiny_models import write
from triton.runtime.interpreter import InterpretedFunction

from tureen.attention import triton as backend
from tureen.attention.base import AttentionNeeds, LayerShape
from tureen.attention.reference import ReferenceAttention
from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.devices.base import DeviceInfo
from tureen.kernels import fused
from tureen.kernels.triton import activation, attention, norm
from tureen.models.torch_decoder import layer_shape
from tureen.runner import load as load_module
from tureen.runner import torch_forward
from tureen.runner.load import load_runner
from tureen.sampling.arithmetic import Softmaxes
from tureen.sampling.torch_arithmetic import TorchArithmetic

GUARDS = ("tureen/kernels/triton/*", "tureen/kernels/fused.py", "attention", "layers", "tureen/runner/cuda_graphs.py")
MODELS = ("llama", "gemma2-softcaps", "mistral-sliding", "qwen3")
NEEDS = AttentionNeeds("cuda", "bfloat16", (LayerShape(8, 2, 128, 0.1, None),), 16)


def load(folder, *, is_fused, tape=None):
    settings = {"device": "cpu", "kernels": "torch", "dtype": "float32", "max_total_tokens": 1024, "num_threads": 1}
    runner = load_runner(folder_source(folder), Config(**settings))
    forward, capacity = runner.forward, runner.capacity()
    if is_fused:
        config, cache = forward._model.config, runner._parts._cache
        layers = [layer_shape(config, layer) for layer in range(config.num_layers)]
        forward._attention = backend.make_backend(layers, cache.keys, cache.values)
        assert isinstance(forward._attention, backend.TritonAttention)
        kernels = fused.find_fused(torch.device("cpu"), torch.float32, config.hidden_size)
        assert kernels is not None
        forward._model.fuse(kernels)
    if tape is not None:
        forward.capture(tape, capacity, capacity.num_pages - 1)
    return runner


def run(runner):
    """Computes prompts in chunks while other rows decode, then decodes all rows."""
    spec = LogprobSpec(prompt_start=0, top=8)
    running = [
        Running(index, random_tokens(4 + 15 * index, index), range(4 * index, 4 * index + 4), logprobs=spec)
        for index in range(3)
    ]
    step(runner, running[1:], [11, 9], score=True)
    step(runner, running, [99, 99, 99], score=True)
    for _ in range(4):
        step(runner, running, [1, 1, 1])
    late = Running(3, random_tokens(9, 9), range(20, 24), logprobs=spec)
    step(runner, [running[0], late, *running[1:]], [1, 5, 1, 1], score=True)
    step(runner, [running[0], late, *running[1:]], [1, 5, 1, 1], score=True)
    return [*running, late]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_kernels_has_the_logprobs_of_the_reference(tmp_path, model, monkeypatch):
    write(tmp_path, model)
    layers, store = set(), backend.TritonAttention.store_rotated
    monkeypatch.setattr(
        backend.TritonAttention,
        "store_rotated",
        lambda self, qkv, at, *more: layers.add(at) or store(self, qkv, at, *more),
    )
    expected = run(load(tmp_path, is_fused=False))
    for runner in (load(tmp_path, is_fused=True), load(tmp_path, is_fused=True, tape=(tape := Launches()))):
        for ours, theirs in zip(run(runner), expected, strict=True):
            assert ours.output == theirs.output
            for own, other in zip(ours.output_logprobs, theirs.output_logprobs, strict=True):
                assert [value for value, _ in own.top] == pytest.approx([value for value, _ in other.top], abs=2e-5)
    assert tape.num_replays == 3
    assert len(layers) == runner.forward._model.config.num_layers  # in all layers one kernel rotates and stores


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_cuda_device_gets_graphs_and_kernels_unless_plain_torch_is_asked_for(tmp_path, monkeypatch, kernels):
    """The device is a CPU that says it is one for CUDA."""
    write(tmp_path, "qwen3")
    tape = Launches()
    monkeypatch.setattr(load_module, "resolve_device", lambda *_: DeviceInfo("cuda", "cpu", 1))
    monkeypatch.setattr(DeviceInfo, "free_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(torch_forward, "CudaRecorder", lambda: tape)
    config = Config(device="cuda", kernels=kernels, dtype="float16", max_total_tokens=1024)
    runner = load_runner(folder_source(tmp_path), config)
    assert [each.errors for each in run(runner)] == [[]] * 4
    forward, is_fast = runner.forward, kernels == "auto"
    assert isinstance(forward._attention, backend.TritonAttention if is_fast else ReferenceAttention)
    assert tape.num_replays == (3 if is_fast else 0)
    assert (runner._sampler._arithmetic._draw_kernel is not None) == is_fast
    assert len(runner._parts._cache.keys[0]) == runner.capacity().num_pages + 1  # one for rows that fill up a step


def test_a_captured_step_launches_as_many_operations_as_the_page_says(monkeypatch):
    launched = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *_, **__: launched.append(self.fn.__name__))
    kernels = fused.FusedKernels(norm.add_norm, activation.activate_and_mul, frozenset(activation.FUNCTIONS))
    totals = []
    for layers in (1, 2):
        launched.clear()
        count = operations(layers, backend.TritonAttention, lambda model: model.fuse(kernels))
        totals.append(count + len(launched))
    one, two = totals
    assert two - one == 11
    assert one + 31 * (two - one) <= 376  # docs/gpu.md, tools/gpu_predictions.py


class Launches(Tape):
    """Replays by computing again: the kernels of the interpreter are no operations of torch."""

    def capture(self, function):
        self.num_captures += 1

        def replay():
            self.num_replays += 1
            function()

        return replay


def test_a_kernel_that_differs_from_its_reference_is_not_used(monkeypatch, caplog):
    pages = [torch.zeros(4, 16, 2, 64)]
    monkeypatch.setattr(attention, "prefill", lambda q, *_: q * 0)
    assert isinstance(backend.make_backend([LayerShape(4, 2, 64, 0.1, None)], pages, pages), ReferenceAttention)
    monkeypatch.setattr(norm, "add_norm", lambda x, *_: x)
    assert fused.find_fused(torch.device("cpu"), torch.float32, 64) is None
    assert [each.partition(",")[0] for each in caplog.messages] == [
        "Triton's kernels for attention are not used",
        "Triton's kernels for norms and activations are not used",
    ]


def test_a_kernel_that_does_not_compile_is_not_used(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(norm, "add_norm", fail)
    assert fused.find_fused(torch.device("cpu"), torch.float32, 64) is None
    assert caplog.messages == [
        "Triton's kernels for norms and activations are not used, which makes steps slower: Failed to find C compiler"
    ]


def test_the_sampler_draws_with_the_kernel_what_it_draws_without(monkeypatch):
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
    uniforms = np.linspace(0, 0.999, 4)
    kernel = fused.find_draw(torch.device("cpu"), 3000)
    assert kernel is not None
    for rows in ([0, 1, 2, 3], [1, 2, 3, 4]):
        index = np.array(rows)
        softmaxes = Softmaxes(logits, index, logits[rows].amax(dim=1).numpy(), np.array([1.0, 0.5, 2.0, 0.1]))
        plain, with_kernel = (TorchArithmetic("cpu", each).draw(softmaxes, uniforms) for each in (None, kernel))
        assert with_kernel.tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"device": "cpu"}, "it runs on CUDA devices, not on cpu"),
        ({"dtype": "float32"}, "it computes in bfloat16 and float16, not in float32"),
        ({"layers": (LayerShape(8, 2, 576, 0.1, None),)}, "heads have 576 numbers, and it has at most 256"),
        ({"layers": (LayerShape(65, 1, 64, 0.1, None),)}, "more than 64 heads share keys"),
        ({"layers": (LayerShape(8, 2, 64, 0.1, None, sees_pictures_whole=True),)}, "it does not show pictures whole"),
        ({}, ""),
    ],
)
def test_what_a_model_needs_and_the_backend_cannot_is_said(change, fault):
    assert backend.why_unsupported(NEEDS._replace(**change)) == fault
