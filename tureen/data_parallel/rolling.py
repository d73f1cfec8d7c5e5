"""Exchanges the weights of replicas one after the other, while the others go on answering."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tureen.data_parallel.peer_workers import Company
from tureen.data_parallel.prefix_index import PrefixIndex
from tureen.data_parallel.replica import Replica
from tureen.errors import Conflict, TureenError
from tureen.log import get_logger
from tureen.serving.healing import TICK_S

log = get_logger("replicas")


async def roll(
    replicas: Sequence[Replica],
    company: Company,
    index: PrefixIndex,
    *,
    version: str | None,
    **source: Any,
) -> int:
    """Gives all replicas other weights: one at a time gets no requests, and those that it has go on in replicas with
    the old weights, or end there. An output never goes on with other weights than it began with.

    company: the fronts that may need a replica. version: name of the new weights, None = that of the old ones. source:
    where the weights are, as the engine's operation `update_weights` takes it.

    Returns 0: no request is computed again. Raises Conflict where there is no replica to answer meanwhile, or
    generation is paused; and what the first replica says when it cannot have the weights: then nothing has changed. A
    later replica that cannot is restarted in the state of the first.
    """
    if sum(not replica.is_drained for replica in replicas) < 2:
        raise Conflict("rolling needs two active replicas: undrain one, or leave rolling out", code="busy")
    if any(replica.stats.is_paused for replica in replicas):
        raise Conflict("generation is paused, so no request would finish: resume it, or leave rolling out", code="busy")
    for replica in replicas:
        replica.weights_fault = ""
    new = max(replica.weights for replica in replicas) + 1
    first: Replica | None = None
    for replica in sorted(replicas, key=lambda each: (not each.is_drained, each.health.state != "healthy")):
        async with replica.away(for_weights=True):
            try:
                await _exchange(replica, replicas, company, source)
            except TureenError as fault:
                if first is None:
                    raise
                log.error("replica %s is restarted with the new weights: %s", replica.label, fault.message)
                replica.weights_fault = fault.message
                replica.client.restart_like(first.client, "it could not load the weights of the others")
            index.forget(replica.number)
            replica.weights, replica.weight_version = new, version
            first = first or replica
        log.info("replica %s has the new weights", replica.label)
    for replica in replicas:
        replica.weight_version = None
    return 0


async def _exchange(replica: Replica, replicas: Sequence[Replica], company: Company, source: Mapping[str, Any]) -> None:
    """Waits until no request needs the weights of a replica, and exchanges them. Raises what the engine does."""
    is_last = sum(other.weights == replica.weights for other in replicas) == 1
    while True:
        while await company.ask("needs" if is_last else "holds", replica):
            await asyncio.sleep(TICK_S)
        try:
            await replica.client.call("update_weights", **source)
            return
        except Conflict as fault:
            if fault.code != "busy":
                raise
            log.info("replica %s got a request meanwhile; waiting for it", replica.label)
