"""An engine client over several: it chooses the replica of each request, and has requests go on in another one when
theirs is lost, silent or drained."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tureen import errors
from tureen.contract.types import EngineHealth, EngineInfo, EngineStats, FinishReason, GenerateRequest, OutputDelta
from tureen.data_parallel.calls import Operations
from tureen.data_parallel.peer_workers import Company
from tureen.data_parallel.pool import Pool, Scaler
from tureen.data_parallel.prefix_index import PrefixIndex
from tureen.data_parallel.replica import OnTurn, Passage, Replica, ReplicaClient
from tureen.data_parallel.rolling import roll
from tureen.data_parallel.routing_policy import place
from tureen.data_parallel.totals import info_of, sum_health, sum_stats
from tureen.log import Progress, get_logger, no_progress
from tureen.serving.client import ReplicaFacts
from tureen.serving.healing import State
from tureen.serving.replay_check import must_repeat
from tureen.serving.streams import Interval, Moved, Watch

if TYPE_CHECKING:
    from tureen.data_parallel.handover import Handover

LOOK_S = 0.05
"""Seconds between two looks at whether any engine is there."""

MakeClient = Callable[[OnTurn], ReplicaClient]

log = get_logger("replicas")


class Router:
    """An EngineClient over several engines of the same model, in processes of their own. Event-loop thread only."""

    info: EngineInfo

    def __init__(self, prefill_min_tokens: int = 1) -> None:
        """prefill_min_tokens: see Handover, which there is where replicas have roles."""
        self.replicas: list[Replica] = []
        self._passages: dict[str, Passage] = {}
        self.company = Company(self.replicas, self._passages)
        self._index = self.company.prefixes
        self._operations = Operations(lambda: (), {})
        self._pool: Pool | None = None
        self._num_moved = 0
        self._handover: Handover | None = None
        self._prefill_min_tokens = prefill_min_tokens
        self._is_open = False

    async def start(
        self,
        clients: Sequence[MakeClient],
        progress: Progress = no_progress,
        *,
        num_first: int | None = None,
        scaler: Scaler | None = None,
    ) -> EngineInfo:
        """Starts a replica for each function, which makes its client from one that hears of its engine's states. The
        first is started before the others: what it keeps on disk they find there.

        num_first: how many are started now, all without it; `scaler` decides about the others. Raises StartupError.
        """
        self._make_replicas(clients)
        first, *others = self.replicas[:num_first]
        for later in self.replicas[1 + len(others) :]:
            later.client.park()
        try:
            await first.client.start(progress)
            results = await asyncio.gather(*(other.client.start() for other in others), return_exceptions=True)
            for fault in results:
                if isinstance(fault, BaseException):
                    raise fault
            self._open([replica.client.info for replica in (first, *others)])
        except BaseException:
            await self.close()
            raise
        if scaler is not None:
            self._pool = Pool(self.replicas, scaler, self.company)
            self._pool.begin()
        return self.info

    async def join(self, clients: Sequence[MakeClient], facts: Sequence[ReplicaFacts] = ()) -> EngineInfo:
        """Looks for engines that others have started. Returns as soon as one is there; the others are used when they
        are found.

        facts: what the owner says of them, where it is another front. Raises StartupError when none can be had.
        """
        self._make_replicas(clients)
        self.follow(facts)
        for replica in self.replicas:
            replica.client.begin()
        try:
            while not (there := [each.client for each in self.replicas if each.client.health.state == "healthy"]):
                if self.failure is not None:
                    raise errors.StartupError(self.failure)
                await asyncio.sleep(LOOK_S)
            for replica in self.replicas:
                if replica.client not in there:
                    replica.client.info = there[0].info  # until it tells
            self._open([client.info for client in there])
        except BaseException:
            await self.close()
            raise
        return self.info

    def _make_replicas(self, clients: Sequence[MakeClient]) -> None:
        for number, make_client in enumerate(clients):
            replica = Replica(number, self._settle, self.company)
            replica.drive_by(make_client(partial(self._hear_turn, replica)))
            self.replicas.append(replica)

    def _open(self, infos: Sequence[EngineInfo]) -> None:
        """Takes requests from now on. infos: of the engines that are there."""
        self.info = info_of(infos)
        least = min(info.max_total_tokens for info in infos)
        self._index = PrefixIndex(len(self.replicas), self.info.page_size, least // self.info.page_size)
        self.company.prefixes = self._index
        self._operations = Operations(self._running, self.info.adapters)
        if fault := self._meet():
            raise errors.StartupError(fault, field="replicas")
        self._is_open = True

    def _meet(self) -> str:
        """Heeds the roles that replicas have. Returns why they cannot be kept to; "" where they can."""
        if all(each.role == "both" for each in self.replicas):
            return ""
        handover = importlib.import_module("tureen.data_parallel.handover")
        least = self._prefill_min_tokens
        self._handover = handover.Handover(self._running, self._index, self.info.page_size, least)
        return str(handover.fault_of(self.replicas))

    def follow(self, facts: Sequence[ReplicaFacts]) -> None:
        """Hears the facts about the replicas from the front that owns them."""
        self.company.follow(facts)
        self._settle()

    def _running(self) -> list[Replica]:
        """Returns the replicas that have an engine, or are to have one again."""
        return [replica for replica in self.replicas if not replica.is_parked]

    def generate(
        self, request: GenerateRequest, interval: Interval = 1, watch: Watch | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Streams a request's output from the replica chosen for it, and from others after that; see EngineClient."""
        return self._generate(request, interval, watch)

    async def _generate(
        self, request: GenerateRequest, interval: Interval, watch: Watch | None
    ) -> AsyncGenerator[OutputDelta, None]:
        if request.id in self._passages:
            raise errors.InvalidRequest(f"rid {errors.echo(request.id)} is in use", field="rid")
        passage = self._passages[request.id] = Passage(request, watch, self._index.pages_of(request))
        del request
        try:
            if self._handover is not None:
                await self._handover.prepare(passage)
            while not passage.has_ended:
                async with contextlib.aclosing(self._attempt(passage, interval)) as deltas:
                    async for delta in deltas:
                        passage.has_ended = delta.finish is not None
                        yield delta
        finally:
            del self._passages[passage.live.request.id]

    async def _attempt(self, passage: Passage, interval: Interval) -> AsyncGenerator[OutputDelta, None]:
        """Streams a request from one replica; ends with it, or when the request is to go on elsewhere."""
        rest = passage.live.rest(time.monotonic())
        if passage.abort_reason is not None:
            rest = FinishReason(type="abort", message="Aborted", reason=passage.abort_reason)
        if isinstance(rest, FinishReason):
            if passage.watch is not None:
                passage.watch(0)
            yield OutputDelta(passage.live.request.id, usage=passage.live.usage, finish=rest)
            return
        is_repeated = bool(passage.num_moves) and must_repeat(rest)
        replica = place(passage, rest, self._running(), self._index, self.info.page_size)
        if replica is None:
            raise _refusal(self._running(), self.health.retry_after_s)
        rest = passage.continued(rest) if passage.num_moves else rest
        heard, hardware = passage.heard_of(replica), passage.hardware_with(replica)
        watch = None if is_repeated else heard  # who hears of a token twice pays for it twice
        try:
            async with contextlib.aclosing(replica.client.generate(rest, interval, watch)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if delta.token_ids or delta.finish is not None:  # not: progress of the prompt
                        passage.note(len(delta.token_ids))
                        passage.weights, passage.hardware = replica.weights, hardware
                    new = passage.live.take(delta)
                    if new is None:
                        continue
                    if is_repeated and heard is not None:
                        heard(len(new.token_ids))
                    yield passage.as_asked(new)
            self._remember(passage, replica)
        except Moved:
            passage.num_moves += 1
            self._num_moved += 1
            log.info("request %s continues in another replica than %s", passage.live.request.id, replica.label)
        finally:
            passage.leave()

    def _remember(self, passage: Passage, replica: Replica) -> None:
        """Notes what a request that has ended leaves in the cache of its replica."""
        if len(passage.live.token_ids) >= self.info.page_size:
            self._index.give(replica.number, self._index.pages_of(passage.live.request, tuple(passage.live.token_ids)))

    def _hear_turn(self, replica: Replica, before: State, state: State) -> None:
        """Hears that an engine has come into another state: has requests go where they are answered soonest."""
        if not self._is_open:
            return
        if state == "healthy" and before != "suspect":
            self.info = info_of([each.client.info for each in self._running()])
            if fault := self._meet():
                log.error("%s", fault)
        if state == "unloaded":
            self._index.forget(replica.number)
        if state == "replacing" and before != "replacing":
            self._index.forget(replica.number)
            for passage in replica.passages.values():
                passage.num_deaths += not replica.is_drained
        self._settle()

    def _settle(self) -> None:
        """Has the requests of replicas that are not well, or drained, go on in others, where there are others."""
        well = [each for each in self._running() if not each.is_drained and each.client.health.state == "healthy"]
        for replica in self.replicas if well else ():
            if replica not in well:
                leaving = [name for name, passage in replica.passages.items() if passage.may_move_to(well)]
                replica.client.hand_over(leaving)

    def abort(self, request_id: str, reason: str = "client") -> None:
        """Ends a request wherever it is. Does nothing for an unknown id."""
        passage = self._passages.get(request_id)
        if passage is None or passage.has_ended:
            return
        passage.abort_reason = reason  # it may be between two replicas
        if passage.replica is not None:
            passage.replica.client.abort(passage.attempt_id, reason)

    async def call(self, op: str, **args: Any) -> object:
        """Runs a control operation on all replicas, and returns what one engine would: sums, or what is equal in all.

        Raises a TureenError that names the replicas on which it failed; see Operations. `roll_weights`, which an engine
        does not know, is `update_weights` in one replica after the other: see roll.
        """
        if op == "roll_weights":
            async with contextlib.nullcontext() if self._pool is None else self._pool.held():
                return await roll(self._running(), self.company, self._index, **args)
        if op in ("flush_cache", "update_weights", "release_memory"):
            for replica in self.replicas:
                self._index.forget(replica.number)
        return await self._operations.run(op, args)

    @property
    def failure(self) -> str | None:
        """The reason why requests are refused; None while any replica takes them."""
        failures = [replica.client.failure for replica in self._running()]
        return None if None in failures else "; ".join(map(str, failures))

    @property
    def health(self) -> EngineHealth:
        """The state of the replica that is best off, and the totals of all."""
        return sum_health([replica.client.health for replica in self._running()], self._num_moved)

    @property
    def stats(self) -> EngineStats:
        """The figures of all replicas together."""
        return sum_stats([replica.client.stats for replica in self.replicas])

    @property
    def num_live(self) -> int:
        return sum(not passage.has_ended for passage in self._passages.values())

    async def close(self) -> None:
        self._is_open = False
        if self._pool is not None:
            await self._pool.close()
        await asyncio.gather(*(replica.client.close() for replica in self.replicas), return_exceptions=True)


def _refusal(replicas: Sequence[Replica], retry_after_s: int) -> errors.TureenError:
    reasons = "; ".join(f"replica {each.label}: {each.client.health.reason}" for each in replicas)
    return errors.Unavailable(f"no replica takes requests ({reasons})", code="engine_dead", retry_after_s=retry_after_s)
