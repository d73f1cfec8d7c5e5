"""Runs the periodic work: logs statistics under load, updates metrics that are rates, closes expired sessions."""

from __future__ import annotations

import asyncio
import contextlib
import time

from tureen.contract.types import EngineStats
from tureen.errors import TureenError
from tureen.log import get_logger
from tureen.requests.state import ServerState

log = get_logger("stats")


async def report_forever(state: ServerState) -> None:
    """Runs until cancelled, every `log_interval_s` seconds. Logs nothing while the engine does nothing."""
    before, before_s = state.client.stats, time.monotonic()
    num_preemptions = 0
    while True:
        await asyncio.sleep(state.context.config.log_interval_s)
        state.sessions.sweep()
        state.quotas.sweep()
        state.recordings.sweep()
        if state.recordings.responses is not None:
            with contextlib.suppress(TureenError):  # the storage has logged it; requests are told
                await state.recordings.responses.sweep()
        now, now_s = state.client.stats, time.monotonic()
        seconds = now_s - before_s
        hit_rate = _rate(
            now.total_cached_tokens - before.total_cached_tokens, now.total_prompt_tokens - before.total_prompt_tokens
        )
        state.metrics.set("cache_hit_rate", hit_rate)
        state.metrics.set("gen_throughput", (now.total_output_tokens - before.total_output_tokens) / seconds)
        state.metrics.add("num_retracted_requests", now.total_preemptions - num_preemptions)
        num_preemptions = now.total_preemptions
        if now.total_steps != before.total_steps:
            log.info(line(before, now, seconds, hit_rate))
        before, before_s = now, now_s


def line(before: EngineStats, now: EngineStats, seconds: float, hit_rate: float) -> str:
    """Returns the log line about the `seconds` between two statistics."""
    num_in = now.total_prompt_tokens - before.total_prompt_tokens
    num_out = now.total_output_tokens - before.total_output_tokens
    used = now.num_pages - now.num_free_pages - now.num_cached_pages
    return (
        f"running {now.num_running}, queued {now.num_queued}, in {num_in / seconds:.1f} tok/s, "
        f"out {num_out / seconds:.1f} tok/s, cache hits {hit_rate:.0%}, KV use {_rate(used, now.num_pages):.0%}"
    )


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
