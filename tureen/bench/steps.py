"""Divides the time of a decode step with the real model: native code, the rest of the runner, the engine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tureen.bench.http import BenchError
from tureen.bench.overhead import RUNNING, make_request
from tureen.bench.report import Spread, spread
from tureen.build import find_model
from tureen.config import Config
from tureen.contract.runner import Batch, Capacity, Masks, PendingStep
from tureen.contract.types import MediaItem
from tureen.engine.engine import Engine
from tureen.runner.load import load_runner

STEPS = 100
LEAD = 100  # steps in which the first sequences decode and the last prompts are still computed, at most


class StepShare(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one decode step of a number of sequences."""

    running: int
    step_ms: Spread
    engine_ms: Spread  # plan, commit, detokenize
    runner_ms: Spread  # the runner without the forward pass: its arguments, drawing the tokens
    forward_ms: Spread  # in native code
    python: float  # share of a step that is not the forward pass, the median of all


class TimedRunner:
    """A runner that knows how long its last step took, and the native code in it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.run_s = self.forward_s = 0.0

    def submit(self, batch: Batch, masks: Masks | None = None) -> PendingStep:
        native_s, start = self._runner.forward.seconds, time.perf_counter()
        step: PendingStep = self._runner.submit(batch, masks)
        self.run_s = time.perf_counter() - start
        self.forward_s = self._runner.forward.seconds - native_s
        return step

    def capacity(self) -> Capacity:
        capacity: Capacity = self._runner.capacity()
        return capacity

    def encode(self, item: MediaItem) -> Iterator[bytes | None]:
        pieces: Iterator[bytes | None] = self._runner.encode(item)
        return pieces

    def call(self, op: str, **args: Any) -> object:
        return self._runner.call(op, **args)

    def close(self) -> None:
        self._runner.close()


def step_shares(config: Config) -> list[StepShare]:
    """Measures at 1, 16 and 64 sequences. Raises StartupError where there are no native kernels: only they know their
    time."""
    config = msgspec.structs.replace(config, device="cpu", kernels="native")
    model = find_model(config)
    runner = TimedRunner(load_runner(model.source, config))
    engine = Engine(runner, model.tokenizer, eos_token_ids=(), prefix_cache=False)
    try:
        return [_share(engine, runner, running) for running in RUNNING]
    finally:
        engine.close()


def _share(engine: Engine, runner: TimedRunner, running: int) -> StepShare:
    dice = random.Random(running)
    names = [f"{running}-{index}" for index in range(running)]
    for name in names:
        engine.add(make_request(name, dice, output_len=STEPS + LEAD))
    while len(engine.step()) < running:  # some prompts are not computed yet
        pass
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        deltas = engine.step()
        times.append((time.perf_counter() - start, runner.run_s, runner.forward_s))
        if len(deltas) != running:
            raise BenchError(f"a step with {running} sequences gave {len(deltas)} deltas")
    for name in names:
        engine.abort(name)
    engine.step()
    step, run, forward = (list(column) for column in zip(*times, strict=True))
    return StepShare(
        running=running,
        step_ms=spread(step),
        engine_ms=spread([whole - part for whole, part in zip(step, run, strict=True)]),
        runner_ms=spread([whole - part for whole, part in zip(run, forward, strict=True)]),
        forward_ms=spread(forward),
        python=round(statistics.median(1 - part / whole for whole, part in zip(step, forward, strict=True)), 4),
    )
