"""What tureen itself adds to the model's time: the engine's Python a step, and the way over HTTP."""

from __future__ import annotations

import random
import time

import msgspec

from tureen.bench.http import BenchError
from tureen.bench.report import Spread
from tureen.engine.engine import Engine
from tureen.runner.base import Batch, Capacity, StepOutput
from tureen.runner.fake import FakeRunner
from tureen.sampling.params import SamplingParams
from tureen.text.tokenizer import Tokenizer
from tureen.types import GenerateRequest

RUNNING = (1, 16, 64)
PROMPT_LEN = 128
STEPS = 100
REQUESTS = 200
CAPACITY = Capacity(num_pages=2048, page_size=16, max_rows=64, vocab_size=49152, context_len=8192)


class TimedRunner(FakeRunner):
    """Knows how long its own last step took: that is not the engine's time."""

    last_run_s = 0.0

    def run(self, batch: Batch) -> StepOutput:
        start = time.perf_counter()
        output = super().run(batch)
        self.last_run_s = time.perf_counter() - start
        return output


class EngineOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """One decode step with so many sequences running: plan, commit and detokenize, without the runner."""

    running: int
    step_ms: Spread


class HttpOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one token over a kept connection, answered by the client's engine, and the same without HTTP."""

    http_ms: Spread
    direct_ms: Spread
    added_p50_ms: float


def engine_overhead(tokenizer: Tokenizer) -> list[EngineOverhead]:
    """Median and tail of the engine's own time a step."""
    return [_engine_overhead(tokenizer, running) for running in RUNNING]


def _engine_overhead(tokenizer: Tokenizer, running: int) -> EngineOverhead:
    runner = TimedRunner(CAPACITY)
    engine = Engine(runner, tokenizer, eos_token_ids=(), token_budget=512)
    dice = random.Random(running)
    for index in range(running):
        engine.add(_request(f"r{index}", dice, output_len=2 * STEPS))
    while runner.num_tokens < running * (PROMPT_LEN + 1):  # all prompts are computed
        engine.step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        deltas = engine.step()
        times.append(time.perf_counter() - start - runner.last_run_s)
        if len(deltas) != running:
            raise BenchError(f"a step with {running} sequences gave {len(deltas)} deltas")
    return EngineOverhead(running=running, step_ms=_spread(times))


def _request(request_id: str, dice: random.Random, *, output_len: int, prompt_len: int = PROMPT_LEN) -> GenerateRequest:
    return GenerateRequest(
        id=request_id,
        token_ids=tuple(dice.randrange(1000, 40000) for _ in range(prompt_len)),
        params=SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=output_len),
        max_new_tokens=output_len,
        seed=0,
    )
