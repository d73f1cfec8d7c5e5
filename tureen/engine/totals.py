"""Running totals of an engine, and its gauges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.cache.manager import CacheManager
from tureen.contract.types import EngineStats
from tureen.engine.scheduler import Scheduler


class Totals:
    """The numbers that an engine has counted since it was made."""

    def __init__(self) -> None:
        self.requests = 0
        self.steps = 0
        self.output_tokens = 0
        self.forced_tokens = 0

    def stats(
        self,
        scheduler: Scheduler,
        cache: CacheManager,
        *,
        step_ms: float,
        is_paused: bool,
        num_held_back: int,
        more: Mapping[str, Any],
    ) -> EngineStats:
        """Returns the figures of an engine. more: the fields that concern grammars and pictures."""
        return EngineStats(
            num_running=len(scheduler.running),
            num_queued=len(scheduler.queue) + num_held_back,
            num_free_pages=cache.pool.num_free,
            num_cached_pages=cache.tree.num_evictable,
            num_pages=cache.pool.num_pages,
            total_prompt_tokens=scheduler.num_prompt_tokens,
            total_cached_tokens=scheduler.num_cached_tokens,
            total_output_tokens=self.output_tokens,
            total_preemptions=scheduler.num_preemptions,
            total_steps=self.steps,
            step_ms=step_ms,
            is_paused=is_paused,
            total_forced_tokens=self.forced_tokens,
            **more,
        )
