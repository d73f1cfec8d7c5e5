"""Computes figures from answers, and formats them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from tureen.bench.drive import FinishedRequest
from tureen.bench.machine import MemoryReads
from tureen.bench.process import ProcessMemory


class Spread(msgspec.Struct, frozen=True):
    """Median, 99th percentile and maximum of times, in milliseconds."""

    p50: float
    p99: float
    max: float


class Goals(msgspec.Struct, frozen=True):
    """The times that a request must keep, both of them, to count for goodput."""

    ttft_ms: float
    itl_ms: float  # mean over the request


class ColdStart(msgspec.Struct, frozen=True, kw_only=True):
    """The times and the memory of a server that was started here.

    Seconds count from the start of the command, the moment between ready and first request left out. Memory is that of
    all its processes, when ready and at rest after the first request.
    """

    ready_s: float
    first_token_s: float
    memory_when_ready: ProcessMemory | None
    memory_at_rest: ProcessMemory | None


class Result(msgspec.Struct, kw_only=True):
    """The figures of one pass of one workload on one server."""

    workload: str
    target: str
    round: int
    concurrency: int | None  # None = open loop
    rate: float | None  # arrivals a second, open loop
    requests: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # by the server's count
    seconds: float  # first request sent until last answer ended
    output_tok_s: float
    prompt_tok_s: float
    total_tok_s: float
    request_s: float  # requests answered a second
    ttft_ms: Spread | None
    itl_ms: Spread | None  # between events that carried tokens
    e2e_ms: Spread | None
    goodput_request_s: float | None = None  # requests a second that kept the goals
    forced_tokens: int | None = None  # output tokens that were not decoded, by the server's count
    valid: float | None = None  # share of the answers that match their schema; None: nothing was asked of them
    server_cpu_s: float | None = None
    client_cpu_s: float | None = None
    memory_mib: ProcessMemory | None = None
    memory_reads: MemoryReads | None = None  # of this machine, measured just before


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile, linear between the two nearest values, as numpy's default.

    `values` need not be sorted, and must not be empty.
    """
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(seconds: Sequence[float]) -> Spread:
    """Computes a Spread of times in seconds. `seconds` must not be empty."""
    values = (statistics.median(seconds), percentile(seconds, 99), max(seconds))
    return Spread(*(round(1000 * value, 3) for value in values))


def ttft(answer: FinishedRequest) -> float:
    """Returns the seconds from sending a request to its first token."""
    return answer.token_times_s[0] - answer.started_s


def itl(answer: FinishedRequest) -> list[float]:
    """Returns the gaps between events with tokens, in seconds: what a reader waits."""
    return [later - earlier for earlier, later in pairwise(answer.token_times_s)]


def keeps(answer: FinishedRequest, goals: Goals) -> bool:
    """Says whether a request keeps the goals."""
    if answer.refused:
        return False
    decode_s = answer.token_times_s[-1] - answer.token_times_s[0]
    mean_itl = decode_s / (answer.output_tokens - 1) if answer.output_tokens > 1 else 0.0
    return 1000 * ttft(answer) <= goals.ttft_ms and 1000 * mean_itl <= goals.itl_ms


def summarise(
    answers: Sequence[FinishedRequest],
    *,
    workload: str,
    target: str,
    round_number: int = 0,
    concurrency: int | None,
    rate: float | None = None,
    goals: Goals | None = None,
) -> Result:
    """Computes the figures of one pass.

    One request after another: rates of the median request, so that one hiccup does not count; otherwise of the whole
    pass.
    """
    done = [answer for answer in answers if not answer.refused]
    seconds = max(a.ended_s for a in answers) - min(a.started_s for a in answers)
    outputs, prompts = sum(a.output_tokens for a in done), sum(a.prompt_tokens for a in done)
    cached = [a.cached_tokens for a in done if a.cached_tokens is not None]
    latencies = [a.ended_s - a.started_s for a in done]
    forced = [a.forced_tokens for a in done if a.forced_tokens is not None]
    gaps = [gap for a in done for gap in itl(a)]
    busy = statistics.median(latencies) * len(done) if concurrency == 1 and done else seconds
    return Result(
        workload=workload,
        target=target,
        round=round_number,
        concurrency=concurrency,
        rate=rate,
        requests=len(answers),
        refused=len(answers) - len(done),
        prompt_tokens=prompts,
        output_tokens=outputs,
        cached_tokens=sum(cached) if cached else None,
        seconds=round(seconds, 4),
        output_tok_s=round(outputs / busy, 2),
        prompt_tok_s=round(prompts / busy, 2),
        total_tok_s=round((outputs + prompts) / busy, 2),
        request_s=round(len(done) / busy, 4),
        ttft_ms=spread([ttft(a) for a in done]) if done else None,
        itl_ms=spread(gaps) if gaps else None,
        e2e_ms=spread(latencies) if latencies else None,
        goodput_request_s=round(sum(keeps(a, goals) for a in answers) / seconds, 4) if goals else None,
        forced_tokens=sum(forced) if forced else None,
    )


HEADINGS = (
    "workload", "target", "req", "s", "out tok/s", "all tok/s", "TTFT p50", "p99", "max",
    "ITL p50", "p99", "max", "e2e p50", "cached", "cpu srv", "cpu cli", "MiB", "peak", "goodput", "DRAM", "96 MiB",
)  # fmt: skip


NARROW = {
    0: "workload", 1: "target", 2: "requests", 4: "output tok/s", 6: "TTFT ms", 7: "p99 ms", 9: "ITL ms", 12: "e2e ms",
}  # fmt: skip
"""The columns that are shown without --wide, by their places in HEADINGS, with their units."""

LEGENDS = {
    False: "TTFT: from the request to its first token. ITL: from one token to the next. e2e: the whole request.\n"
    "Times are medians, p99 ms that of TTFT. --wide shows all columns.",
    True: "s: seconds of the whole run. all tok/s: with those of prompts. Times in ms: TTFT to the first token,\n"
    "ITL from one token to the next, e2e the whole request. cached: tokens of prompts. cpu: seconds of server and\n"
    "client. MiB, peak: the server's memory. goodput: requests a second within the goals. DRAM, 96 MiB: GB/s read.",
}
"""Whether all columns are shown -> what they mean."""


def table(results: Sequence[Result], *, is_wide: bool) -> str:
    """Format one line a result, and what the columns mean."""
    rows = [_line(result) for result in results]
    if is_wide:
        rows.insert(0, HEADINGS)
    else:
        rows = [tuple(NARROW.values()), *(tuple(row[place] for place in NARROW) for row in rows)]
    return f"{lay_out(rows)}\n\n{LEGENDS[is_wide]}"


def _line(result: Result) -> tuple[str, ...]:
    times = [
        getattr(part, name) if part else None
        for part in (result.ttft_ms, result.itl_ms)
        for name in ("p50", "p99", "max")
    ]
    return (
        result.workload,
        result.target,
        f"{result.requests}" + (f"-{result.refused}" if result.refused else ""),
        in_short(result.seconds),
        in_short(result.output_tok_s),
        in_short(result.total_tok_s),
        *map(in_short, times),
        in_short(result.e2e_ms.p50 if result.e2e_ms else None),
        "–" if result.cached_tokens is None else str(result.cached_tokens),
        in_short(result.server_cpu_s),
        in_short(result.client_cpu_s),
        in_short(result.memory_mib.resident if result.memory_mib else None),
        in_short(result.memory_mib.peak if result.memory_mib else None),
        in_short(result.goodput_request_s),
        in_short(result.memory_reads.dram_gb_s if result.memory_reads else None),
        in_short(result.memory_reads.weights_gb_s if result.memory_reads else None),
    )


def cold_starts(starts: Mapping[str, ColdStart]) -> str:
    """Formats one line for each server that was started here."""
    lines: list[tuple[str, ...]] = [("cold start", "", "ready s", "first token s", "MiB at rest", "of that private")]
    for target, cold in starts.items():
        rest = cold.memory_at_rest
        sizes = (in_short(rest.resident), in_short(rest.private)) if rest else ("–", "–")
        lines.append((target, "", in_short(cold.ready_s), in_short(cold.first_token_s), *sizes))
    return lay_out(lines)


def ratios(results: Sequence[Result], targets: Sequence[str]) -> str:
    """Formats every target's speed over each other target's: the median over the rounds, each compared within itself.

    Speed is tokens a second, but requests a second where each server decides how long its answers are.
    """
    speeds: dict[tuple[str, str], dict[int, float]] = {}
    for result in results:
        speed = result.total_tok_s if result.valid is None else result.request_s
        speeds.setdefault((result.workload, result.target), {})[result.round] = speed
    lines: list[tuple[str, ...]] = [("workload", *(f"{first}/{second}" for first, second in _pairs(targets)))]
    for workload in dict.fromkeys(result.workload for result in results):
        cells = []
        for first, second in _pairs(targets):
            mine, other = speeds.get((workload, first), {}), speeds.get((workload, second), {})
            rounds = [mine[number] / other[number] for number in mine if other.get(number)]
            cells.append(f"{statistics.median(rounds):.2f}x" if rounds else "–")
        lines.append((workload, *cells))
    return lay_out(lines)


def _pairs(targets: Sequence[str]) -> list[tuple[str, str]]:
    return [(targets[0], other) for other in targets[1:]]


def lay_out(lines: Sequence[Sequence[str]]) -> str:
    """Formats columns as wide as they must be: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def in_short(value: float | None) -> str:
    """Formats a number with three digits or so; – for None."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
