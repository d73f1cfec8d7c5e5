"""Sums what several engines of one model report, as if they were one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tureen.contract.types import EngineHealth, EngineInfo, EngineStats, KvDiskStats

STATES = ("healthy", "suspect", "replacing", "unloaded", "down")
"""States of an engine, the best first."""

OTHERWISE = ("step_ms", "is_paused", "seconds_per_end", "helpers_down", "kv_disk")
"""Figures that are not summed."""


def sum_stats(figures: Sequence[EngineStats]) -> EngineStats:
    """Returns the figures of several engines as one's: sums; the longest step; paused where all are."""
    total: dict[str, int | float] = {
        name: sum(getattr(each, name) for each in figures)
        for name in EngineStats.__struct_fields__
        if name not in OTHERWISE
    }
    return msgspec.structs.replace(
        EngineStats(),
        **total,
        step_ms=max(each.step_ms for each in figures),
        is_paused=all(each.is_paused for each in figures),
        seconds_per_end=max(1.0, 1 / sum(1 / each.seconds_per_end for each in figures)),
        helpers_down=tuple(dict.fromkeys(name for each in figures for name in each.helpers_down)),
        kv_disk=_sum_disk([each.kv_disk for each in figures if each.kv_disk is not None]),
    )


def _sum_disk(figures: Sequence[KvDiskStats]) -> KvDiskStats | None:
    """Returns the figures of engines that share one folder as one's."""
    if not figures:
        return None
    totals = {name: sum(getattr(each, name) for each in figures) for name in KvDiskStats.__struct_fields__}
    return KvDiskStats(**totals | {"num_bytes": max(each.num_bytes for each in figures)})


def sum_health(states: Sequence[EngineHealth], num_moved: int) -> EngineHealth:
    """Returns the health of several engines as one's: that of the best, and the totals of all.

    num_moved: requests that went from one engine to another, which no engine has counted.
    """
    best = min(states, key=lambda each: (STATES.index(each.state), each.retry_after_s))
    return msgspec.structs.replace(
        best,
        num_replacements=sum(each.num_replacements for each in states),
        num_resumed=sum(each.num_resumed for each in states) + num_moved,
        num_poison=sum(each.num_poison for each in states),
    )


def info_of(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Returns the facts about several engines as one's: together they hold the tokens and run the requests of all, and
    each of them can have a request of this length."""
    return msgspec.structs.replace(
        infos[0],
        context_len=min(min(info.context_len, info.max_total_tokens) for info in infos),
        max_total_tokens=sum(info.max_total_tokens for info in infos),
        max_running_requests=sum(info.max_running_requests for info in infos),
        load_seconds=max(info.load_seconds for info in infos),
    )
