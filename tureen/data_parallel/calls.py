"""Runs an operator's action on all replicas, so that they stay alike, or says on which it failed."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tureen import errors
from tureen.log import get_logger

if TYPE_CHECKING:
    from tureen.data_parallel.replica import Replica

OF_ANY = ("weight", "stats")
"""Operations that ask for what is equal in all replicas: one that is well is asked."""

FOLLOWED = ("update_weights", "resume_memory", "pause", "resume", "hold", "let_go")
"""Operations after which a replica that could not do them is restarted, in the state of one that could."""

UNDONE_BY = {
    "load_adapter": "unload_adapter",
    "unload_adapter": "load_adapter",
    "release_memory": "resume_memory",
    "start_profile": "stop_profile",
    "start_expert_record": "stop_expert_record",
}
"""Operations that are undone where they succeeded, when they failed elsewhere."""

log = get_logger("replicas")


class Operations:
    """Runs control operations on replicas that are all to be in the same state."""

    def __init__(self, replicas: Callable[[], Sequence[Replica]], adapters: dict[str, str]) -> None:
        """replicas: returns those that have an engine now. `adapters`: that are loaded, name -> path."""
        self._replicas = replicas
        self._adapters = adapters

    async def run(self, op: str, args: dict[str, Any]) -> object:
        """Returns what one engine would: a number is the sum over all, anything else is equal in all.

        When an operation fails on all, raises what the first of them does. When it fails on some: what must be alike
        is brought about by a restart of these; else it is undone on the others, where it can be, and the error names
        the replicas.
        """
        chosen = self._replicas()
        if op in OF_ANY:
            chosen = [min(chosen, key=lambda each: each.client.health.state != "healthy")]
        for replica in chosen if op == "update_weights" else ():
            replica.weights_fault = ""
        outcomes = await asyncio.gather(
            *(each.client.call(op, **_own_args(op, args, each)) for each in chosen), return_exceptions=True
        )
        failed: dict[Replica, errors.TureenError] = {}
        for replica, outcome in zip(chosen, outcomes, strict=True):
            if isinstance(outcome, errors.TureenError):
                failed[replica] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        if len(failed) == len(chosen):
            raise next(iter(failed.values()))
        done = {each: outcome for each, outcome in zip(chosen, outcomes, strict=True) if each not in failed}
        if failed:
            await self._mend(op, args, failed, list(done))
        value = _COMBINED.get(op, _first)(list(done.values()))
        if op in ("load_adapter", "unload_adapter"):
            self._adapters = dict(value)
        return value

    async def _mend(
        self, op: str, args: dict[str, Any], failed: dict[Replica, errors.TureenError], done: list[Replica]
    ) -> None:
        """Makes the replicas alike again. Raises the first fault, with the names of all that failed, unless a restart
        does."""
        told = "; ".join(f"replica {each.number}: {fault.message}" for each, fault in failed.items())
        if op in FOLLOWED:
            log.error("%s failed, and the replica is restarted in the state of the others: %s", op, told)
            for replica, fault in failed.items():
                if op == "update_weights":
                    replica.weights_fault = fault.message
                replica.client.restart_like(done[0].client, f"it failed at what the others completed: {op}")
            return
        error = copy.copy(next(iter(failed.values())))
        error.message = told
        if op in UNDONE_BY:
            await self._undo(op, args, done)
            raise error
        error.message += f" (done on the others: {', '.join(str(each.number) for each in done)})"
        raise error

    async def _undo(self, op: str, args: dict[str, Any], done: list[Replica]) -> None:
        """Undoes an operation. A replica on which that fails is logged, and differs from the others until a restart."""
        undo: dict[str, Any] = {name: args[name] for name in ("name", "tags") if name in args}
        if op == "unload_adapter":
            undo["path"] = self._adapters[args["name"]]
        calls = [each.client.call(UNDONE_BY[op], **undo) for each in done]
        for replica, outcome in zip(done, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                log.error("replica %d: %s cannot be undone: %s", replica.number, op, outcome)


def _own_args(op: str, args: dict[str, Any], replica: Replica) -> dict[str, Any]:
    """Returns the arguments for one replica: each writes a file of its own."""
    if op == "start_profile":
        return args | {"prefix": f"{args.get('prefix', '')}replica{replica.number}-"}
    return args


def _first(values: list[Any]) -> Any:
    return values[0]


def _names(values: list[Any]) -> str:
    return ", ".join(map(str, values))


def _counts(values: list[Any]) -> list[tuple[int, list[int]]]:
    """Adds up counts of experts: (layer, count of each expert) of each replica."""
    return [
        (layers[0][0], [sum(counts) for counts in zip(*(counts for _, counts in layers), strict=True)])
        for layers in zip(*values, strict=True)
    ]


_COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "flush_cache": sum,
    "pause": sum,
    "hold": sum,
    "update_weights": sum,
    "start_profile": _names,
    "stop_profile": _names,
    "take_expert_record": _counts,
}
"""Operations whose results are put together; of the others the first result stands for all."""
