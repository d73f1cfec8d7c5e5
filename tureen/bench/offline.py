"""Runs the `offline` workload: `tureen.Engine` in this process, no HTTP."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any, Protocol

import msgspec

import tureen
from tureen.bench.http import BenchError
from tureen.bench.machine import MemoryReads, memory_reads
from tureen.bench.process import ProcessMemory, memory
from tureen.bench.workloads import Dice, make_load, shapes


class OfflineGenerator(Protocol):
    """The part of `tureen.Engine` that generates."""

    def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]: ...


class OfflineResult(msgspec.Struct, kw_only=True):
    """The figures of a batch of prompts given to `Engine.generate` at once."""

    workload: str
    seed: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    load_s: float
    seconds: float
    output_tok_s: float
    total_tok_s: float
    cpu_s: float
    memory_mib: ProcessMemory | None
    memory_reads: MemoryReads


def run_offline(
    *, model_path: str | None, vocab_size: int, seed: int | None, quick: bool, requests: int | None
) -> list[OfflineResult]:
    """Runs the throughput shapes, one batch each.

    vocab_size: prompts are of random ids below it. Raises BenchError when the engine returns another number of tokens.
    """
    seed = secrets.randbits(32) if seed is None else seed
    started = time.perf_counter()
    settings: dict[str, Any] = {} if model_path is None else {"model_path": model_path}
    with tureen.Engine(**settings) as engine:
        load_s = time.perf_counter() - started
        _timed(engine, "warm-up", [Dice(vocab_size, seed, "warm-up").token_ids(32)], 8)
        results = []
        for shape in shapes("throughput", quick=quick, requests=requests)[: 1 if requests else None]:
            load = make_load(shape, Dice(vocab_size, seed, shape.name))
            prompts = [job.prompt for job in load.jobs if isinstance(job.prompt, list)]
            reads, cpu = memory_reads(), time.process_time()
            seconds, cached = _timed(engine, shape.name, prompts, shape.output_len)
            outputs, inputs = len(prompts) * shape.output_len, sum(map(len, prompts))
            results.append(
                OfflineResult(
                    workload=f"offline-{len(prompts)}",
                    seed=seed,
                    requests=len(prompts),
                    prompt_tokens=inputs,
                    output_tokens=outputs,
                    cached_tokens=cached,
                    load_s=round(load_s, 3),
                    seconds=round(seconds, 3),
                    output_tok_s=round(outputs / seconds, 2),
                    total_tok_s=round((outputs + inputs) / seconds, 2),
                    cpu_s=round(time.process_time() - cpu, 2),
                    memory_mib=memory(os.getpid()),
                    memory_reads=reads,
                )
            )
    return results


def _timed(engine: OfflineGenerator, name: str, prompts: list[list[int]], output_len: int) -> tuple[float, int]:
    """Seconds for the batch and the engine's count of cached tokens."""
    params = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
    started = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - started
    counts = {answer["meta_info"]["completion_tokens"] for answer in answers}
    if counts != {output_len}:
        raise BenchError(f"{name}: asked for {output_len} output tokens each, the engine counted {sorted(counts)}")
    return seconds, sum(answer["meta_info"]["cached_tokens"] for answer in answers)
