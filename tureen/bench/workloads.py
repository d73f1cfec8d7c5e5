"""The workloads: prompts of random token ids with exact lengths, and how they arrive."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

Draw = Callable[[random.Random], int]

# Medians and spreads of the `mixed` workload; lengths are cut to the range given.
MIXED_PROMPT = (128, 0.8, 8, 1024)
MIXED_OUTPUT = (64, 0.7, 4, 256)
MIXED_LOADS = (0.5, 1.0, 3.0)  # shares of the capacity measured just before


class BenchRequest(msgspec.Struct, frozen=True):
    """A greedy request, exactly `output_len` tokens long; with a schema the answer ends by itself, at most there."""

    prompt: list[int] | str
    output_len: int
    schema: str | None = None  # JSON schema that the answer has to match


class TimedPass(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one timed pass of a workload. Lengths are in tokens."""

    name: str
    prompt_len: int  # of its own; `common_len` tokens that all requests share come before them
    output_len: int
    requests: int
    concurrency: int
    common_len: int = 0


class OfferedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs and their arrival: `concurrency` at a time, or (open loop) each at its own second after the start."""

    name: str
    jobs: list[BenchRequest]
    concurrency: int
    arrivals_s: list[float] | None = None
    may_refuse: bool = False  # a 503 is an answer (overload), not a fault


def _throughput(concurrency: int) -> TimedPass:
    return TimedPass(
        name=f"throughput-{concurrency}",
        prompt_len=128,
        output_len=128,
        requests=2 * concurrency,
        concurrency=concurrency,
    )


SHAPES: dict[str, tuple[TimedPass, ...]] = {
    "single": (TimedPass(name="single", prompt_len=32, output_len=128, requests=7, concurrency=1),),
    "prefill": (
        TimedPass(name="prefill-512", prompt_len=512, output_len=1, requests=5, concurrency=1),
        TimedPass(name="prefill-2048", prompt_len=2048, output_len=1, requests=5, concurrency=1),
    ),
    "throughput": (_throughput(16), _throughput(64)),
    "shared-prefix": (
        TimedPass(name="shared-prefix", prompt_len=32, output_len=32, requests=32, concurrency=8, common_len=1024),
    ),
    "long": (TimedPass(name="long", prompt_len=7936, output_len=128, requests=2, concurrency=1),),
}
OVER_HTTP = (*SHAPES, "mixed", "json")


def shapes(
    workload: str, *, quick: bool, requests: int | None = None, concurrency: int | None = None
) -> list[TimedPass]:
    """Returns the passes of a workload as they will run. `quick` = about a quarter of the output and of the
    requests."""
    chosen = SHAPES[workload]
    if concurrency is not None:
        chosen = (
            (_throughput(concurrency),)
            if workload == "throughput"
            else tuple(msgspec.structs.replace(shape, concurrency=concurrency) for shape in chosen)
        )
    if quick:
        chosen = tuple(_quick(shape) for shape in chosen)
    if requests is not None:
        chosen = tuple(msgspec.structs.replace(shape, requests=requests) for shape in chosen)
    return list(chosen)


def _quick(shape: TimedPass) -> TimedPass:
    return msgspec.structs.replace(
        shape,
        output_len=max(1, shape.output_len // 4),
        requests=max(shape.concurrency, -(-shape.requests // 4)),
    )


class Dice:
    """Seeded draws. Each pass of each target has its own, so that no server has seen a prompt before."""

    def __init__(self, vocab_size: int, *seed: object) -> None:
        self.random = random.Random("/".join(map(str, seed)))
        # Special tokens stand at the ends of a vocabulary: the middle is plain text in every model known to us.
        self.first_id, self.last_id = vocab_size // 16, vocab_size - vocab_size // 16 - 1

    def token_ids(self, count: int) -> list[int]:
        """Returns random token ids."""
        return [self.random.randint(self.first_id, self.last_id) for _ in range(count)]

    def length(self, median: float, sigma: float, least: int, most: int) -> int:
        """Draws a lognormal length, cut to [least, most]."""
        return max(least, min(most, round(median * self.random.lognormvariate(0.0, sigma))))

    def arrivals(self, count: int, rate: float) -> list[float]:
        """Returns the arrivals of a Poisson process with `rate` arrivals a second, in seconds after the start; the
        first comes at 0."""
        times = [0.0]
        while len(times) < count:
            times.append(times[-1] + self.random.expovariate(rate))
        return times[:count]


def make_load(shape: TimedPass, dice: Dice, *, rate: float | None = None) -> OfferedLoad:
    """Makes the jobs of a shape; with `rate` they arrive by chance, `rate` a second on average, whatever is still
    running."""
    common = dice.token_ids(shape.common_len)
    jobs = [BenchRequest(common + dice.token_ids(shape.prompt_len), shape.output_len) for _ in range(shape.requests)]
    arrivals = None if rate is None else dice.arrivals(len(jobs), rate)
    return OfferedLoad(name=shape.name, jobs=jobs, concurrency=shape.concurrency, arrivals_s=arrivals)


def mixed_jobs(dice: Dice, count: int) -> list[BenchRequest]:
    """Makes jobs whose prompts and outputs have lognormal lengths."""
    return [BenchRequest(dice.token_ids(dice.length(*MIXED_PROMPT)), dice.length(*MIXED_OUTPUT)) for _ in range(count)]
