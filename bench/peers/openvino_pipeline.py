"""OpenVINO GenAI in this process, with the requests and the figures of `tureen bench`:

    PYTHONPATH=. python bench/peers/openvino_pipeline.py MODEL --workload single,throughput --json FILE

MODEL is a folder made by `optimum-cli export openvino`. Needs openvino-genai and msgspec. There is no HTTP in between:
the loop below hands requests to its continuous batching, steps it, and notes when tokens come.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import openvino
import openvino_genai

from tureen.bench.drive import FinishedRequest
from tureen.bench.machine import describe, memory_reads
from tureen.bench.process import TICKS, memory
from tureen.bench.report import ColdStart, Result, cold_starts, summarise, table
from tureen.bench.workloads import SHAPES, BenchRequest, Dice, TimedPass, make_load, shapes

TARGET = "openvino"
VOCAB_SIZE = 49152  # of the default model
CACHE_GIB = 2
WARM_UP = TimedPass(name="warm-up", prompt_len=32, output_len=8, requests=4, concurrency=2)


class Running:
    """A request that the pipeline has."""

    def __init__(
        self, pipeline: openvino_genai.ContinuousBatchingPipeline, number: int, index: int, job: BenchRequest
    ) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job.output_len
        config.ignore_eos = True
        self.index = index
        self.job = job
        self.times_s: list[float] = []
        self.output_tokens = 0
        self.started_s = time.perf_counter()
        ids = openvino.Tensor(np.array([job.prompt], dtype=np.int64))
        self._handle = pipeline.add_request(number, ids, config)

    def take(self, now: float) -> bool:
        """Note the tokens that have come. True at the end."""
        if self._handle.can_read():
            self.output_tokens += sum(len(output.generated_ids) for output in self._handle.read().values())
            self.times_s.append(now)
        return self._handle.get_status() != openvino_genai.GenerationStatus.RUNNING

    def answer(self) -> FinishedRequest:
        if self.output_tokens != self.job.output_len:
            raise SystemExit(f"asked for {self.job.output_len} output tokens, OpenVINO gave {self.output_tokens}")
        return FinishedRequest(
            started_s=self.started_s,
            token_times_s=self.times_s,
            ended_s=self.times_s[-1],
            prompt_tokens=len(self.job.prompt),
            output_tokens=self.output_tokens,
        )


class Pipeline:
    def __init__(self, model: Path) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2048
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self._numbers = itertools.count()

    def run(self, jobs: list[BenchRequest], concurrency: int) -> list[FinishedRequest]:
        """`concurrency` at a time; the answers in the order of the jobs."""
        waiting: Iterator[tuple[int, BenchRequest]] = iter(enumerate(jobs))
        running: list[Running] = []
        answers: dict[int, FinishedRequest] = {}
        while len(answers) < len(jobs):
            for index, job in itertools.islice(waiting, concurrency - len(running)):
                running.append(Running(self._pipeline, next(self._numbers), index, job))
            self._pipeline.step()
            now = time.perf_counter()
            ended = [request for request in running if request.take(now)]
            answers |= {request.index: request.answer() for request in ended}
            running = [request for request in running if request not in ended]
        return [answers[index] for index in range(len(jobs))]


def start(model: Path, dice: Dice) -> tuple[Pipeline, dict[str, ColdStart]]:
    """Ready, and warm. Its times count from the start of this process."""
    pipeline = Pipeline(model)
    ready_s, when_ready = age_s(), memory(os.getpid())
    pipeline.run([BenchRequest(dice.token_ids(WARM_UP.prompt_len), 1)], 1)
    cold_start = ColdStart(
        ready_s=round(ready_s, 2),
        first_token_s=round(age_s(), 2),
        memory_when_ready=when_ready,
        memory_at_rest=memory(os.getpid()),
    )
    pipeline.run(make_load(WARM_UP, dice).jobs, WARM_UP.concurrency)
    return pipeline, {TARGET: cold_start}


def age_s() -> float:
    """Seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    uptime_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return uptime_s - int(fields[19]) / TICKS


def measure(pipeline: Pipeline, shape: TimedPass, dice: Dice) -> Result:
    load = make_load(shape, dice)
    reads = memory_reads()
    cpu = time.process_time()
    answers = pipeline.run(load.jobs, load.concurrency)
    result = summarise(answers, workload=load.name, target=TARGET, concurrency=load.concurrency)
    result.server_cpu_s = round(time.process_time() - cpu, 2)
    result.memory_mib = memory(os.getpid())
    result.memory_reads = reads
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--workload", default="single", help=f"some of {', '.join(SHAPES)}, with commas [single]")
    parser.add_argument("--concurrency", type=int, metavar="N", help="N requests at a time [the workload's own]")
    parser.add_argument("--quick", action="store_true", help="a quarter of the output and of the requests")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    options = parser.parse_args()
    seed = secrets.randbits(32)
    pipeline, cold = start(options.model, Dice(VOCAB_SIZE, seed, "warm-up"))
    results = [
        measure(pipeline, shape, Dice(VOCAB_SIZE, seed, shape.name))
        for workload in options.workload.split(",")
        for shape in shapes(workload, quick=options.quick, concurrency=options.concurrency)
    ]
    print(table(results), cold_starts(cold), sep="\n\n")
    if options.json:
        document = {"machine": describe(), "seed": seed, "cold_starts": cold, "results": results}
        options.json.write_text(json.dumps(msgspec.to_builtins(document), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
