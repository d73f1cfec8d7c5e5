"""Runs the periodic work: logs statistics under load, updates metrics that are rates, closes expired sessions, keeps
the history that /status draws."""

from __future__ import annotations

import asyncio
import contextlib
import time

from tureen.contract.types import EngineStats
from tureen.errors import TureenError
from tureen.log import get_logger
from tureen.metrics import SAMPLE_S, Level
from tureen.requests.state import Common, ServerState

log = get_logger("stats")


class Reporter:
    """Reports on one model: what has changed since the last time."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._before, self._before_s = state.client.stats, time.monotonic()

    def report(self) -> None:
        """Updates the metrics that are rates, and logs a line unless the engine did nothing."""
        state, before, before_s = self._state, self._before, self._before_s
        now, now_s = state.client.stats, time.monotonic()
        seconds = now_s - before_s
        hit_rate = _rate(
            now.total_cached_tokens - before.total_cached_tokens, now.total_prompt_tokens - before.total_prompt_tokens
        )
        state.metrics.set("cache_hit_rate", hit_rate)
        state.metrics.set("gen_throughput", (now.total_output_tokens - before.total_output_tokens) / seconds)
        if now.total_steps != before.total_steps:
            log.info(line(before, now, seconds, hit_rate))
        self._before, self._before_s = now, now_s


async def report_forever(common: Common, interval_s: float) -> None:
    """Runs until cancelled, every `interval_s` seconds. Logs nothing while the engines do nothing."""
    reporters: dict[ServerState, Reporter] = {}
    while True:
        for state in common.states:
            if state not in reporters:
                reporters[state] = Reporter(state)
        await asyncio.sleep(interval_s)
        common.quotas.sweep()
        common.recordings.sweep()
        if common.recordings.responses is not None:
            with contextlib.suppress(TureenError):  # the storage has logged it; requests are told
                await common.recordings.responses.sweep()
        for state, reporter in reporters.items():
            state.sessions.sweep()
            reporter.report()


async def sample_forever(common: Common) -> None:
    """Runs until cancelled: adds to the history of each model, every SAMPLE_S seconds."""
    while True:
        for state in common.states:
            sample(state)
        await asyncio.sleep(SAMPLE_S)


def sample(state: ServerState) -> None:
    """Adds a sample to the history of a model."""
    stats = state.client.stats
    state.metrics.history.take(
        Level(
            time.monotonic(),
            stats.total_output_tokens,
            stats.total_prompt_tokens,
            stats.num_running,
            stats.num_queued,
            _rate(stats.num_used_pages, stats.num_pages),
        )
    )


def line(before: EngineStats, now: EngineStats, seconds: float, hit_rate: float) -> str:
    """Returns the log line about the `seconds` between two statistics."""
    num_in = now.total_prompt_tokens - before.total_prompt_tokens
    num_out = now.total_output_tokens - before.total_output_tokens
    kv_use = f"{_rate(now.num_used_pages, now.num_pages):.0%}"
    if now.num_window_pages:
        kv_use += f", of window pages {_rate(now.num_used_window_pages, now.num_window_pages):.0%}"
    return (
        f"running {now.num_running}, queued {now.num_queued}, in {num_in / seconds:.1f} tok/s, "
        f"out {num_out / seconds:.1f} tok/s, cache hits {hit_rate:.0%}, KV use {kv_use}"
    )


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
