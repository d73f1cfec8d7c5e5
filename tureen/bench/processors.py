"""Measures the time that a custom logit processor adds to a step: one worker, one row."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from tureen.bench.report import Spread, spread
from tureen.contract.params import SamplingParams
from tureen.contract.runner import SlotState
from tureen.kernels.cpu import native
from tureen.sampling.arithmetic import Arithmetic, Logits
from tureen.sampling.custom import CustomProcessors
from tureen.sampling.native_arithmetic import NativeArithmetic
from tureen.sampling.processor_pool import ProcessorPool
from tureen.sampling.sampler import Sampler

VOCAB_SIZE = 49152
STEPS = 1000
HEAD = """
from tureen.logit_processor import CustomLogitProcessor

class Mine(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
"""
CLASSES = {
    "does nothing": """
        return logits
""",
    "forces a token": """
        logits[0, :] = -float("inf")
        logits[0, custom_param_list[0]["token_id"]] = 0.0
        return logits
""",
}


class ProcessorOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """The times of sampling a step's one row greedily with a processor, and without one; they take turns."""

    processor: str
    with_ms: Spread
    without_ms: Spread
    added_p50_ms: float


def processor_overhead() -> list[ProcessorOverhead]:
    """Measures processors that clients send as code. Raises StartupError where there is no sandbox."""
    arithmetic = _arithmetic()
    pool = ProcessorPool(1, VOCAB_SIZE)
    processors = CustomProcessors({}, pool)
    try:
        for body in CLASSES.values():
            pool.acquire("", _payload(body)).is_settled.wait()
        return [_measure(arithmetic, processors, name, body) for name, body in CLASSES.items()]
    finally:
        processors.close()


def _arithmetic() -> Arithmetic:
    """Returns the arithmetic of a server on the CPU, with one thread."""
    kernels = native.load()
    if kernels is not None:
        return NativeArithmetic(kernels.Pool(1))
    import torch  # noqa: PLC0415 - the CPU does without where it has its own kernels

    from tureen.sampling.torch_arithmetic import TorchArithmetic  # noqa: PLC0415

    torch.set_num_threads(1)
    return TorchArithmetic("cpu")


def _measure(arithmetic: Arithmetic, processors: CustomProcessors, name: str, body: str) -> ProcessorOverhead:
    logits = arithmetic.adopt(np.random.default_rng(0).standard_normal((1, VOCAB_SIZE), np.float32))
    step_with, step_without = (
        _stepper(arithmetic, processors, processor, logits) for processor in (_payload(body), "")
    )
    times: dict[Callable[[], None], list[float]] = {step_with: [], step_without: []}
    for step in times:
        step()
    for _ in range(STEPS):
        for step, taken in times.items():
            begun = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begun)
    slow, fast = spread(times[step_with]), spread(times[step_without])
    return ProcessorOverhead(processor=name, with_ms=slow, without_ms=fast, added_p50_ms=slow.p50 - fast.p50)


def _stepper(
    arithmetic: Arithmetic, processors: CustomProcessors, processor: str, logits: Logits
) -> Callable[[], None]:
    sampler = Sampler(1, VOCAB_SIZE, arithmetic, processors)
    params = SamplingParams(temperature=0.0, custom_params={"token_id": 5})
    prompt = tuple(random.Random(0).choices(range(VOCAB_SIZE), k=100))
    sampler.set_slot(SlotState(0, params, 0, prompt, (), (), None, processor))
    positions = iter(range(len(prompt), 1 << 30))

    def step() -> None:
        sampler.sample(arithmetic.copy(logits, [0]), [0], [next(positions)])

    return step


def _payload(body: str) -> str:
    """Returns the processor as a client's script would send it."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(HEAD + body, scope)  # noqa: S102 - the text above
    return str(scope["Mine"].to_str())
