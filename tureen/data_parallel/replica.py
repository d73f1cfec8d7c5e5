"""One of several engines: its client, and the requests that it was given."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from tureen.contract.types import EngineHealth, EngineRole, EngineStats, GenerateRequest, OutputDelta, Timeline
from tureen.data_parallel.peer_workers import Company
from tureen.serving.client import ReplicaFacts
from tureen.serving.healing import TICK_S, HealingClient, MakeHost, State
from tureen.serving.process import ProcessHost
from tureen.serving.streams import Live, Streams, Watch
from tureen.serving.unblamed import UnblamedStreams

STAYS_AFTER = 1
"""Number of times that an engine may die under a request before it stays with the replica it is on: what kills engine
after engine must not go round, and is found there (see Trials)."""

MOST_MOVES = 8
"""Number of moves after which a request stays where it is, whatever the reason was."""

OnTurn = Callable[[State, State], None]
"""A function that hears an engine's state before and now; they may be equal."""


class ReplicaClient(HealingClient):
    """The client of one replica. It tells of each state that its engine comes into, and hands requests over."""

    engine_id = ""
    """Tells an engine elsewhere that is in the state that it is to be in from others."""

    address = ""
    """Tells other fronts where an engine in an actor is; "" = nowhere now, or it is in no actor."""

    role: EngineRole = "both"

    def __init__(
        self,
        make_host: MakeHost,
        on_turn: OnTurn,
        *,
        watchdog_timeout_s: float,
        freeze_grace_s: float,
        streams: Streams | None = None,
    ) -> None:
        """streams: where other fronts use the engine, too."""
        super().__init__(make_host, watchdog_timeout_s=watchdog_timeout_s, freeze_grace_s=freeze_grace_s)
        self._on_turn = on_turn
        if streams is not None:
            self._streams = streams

    def begin(self) -> None:
        """Begins to look for an engine, and goes on until there is one; called in place of `start`."""
        self._tasks["replace"] = asyncio.create_task(self._find_first())
        self._tasks["watch"] = asyncio.create_task(self._watch())

    async def _find_first(self) -> None:
        await self._restart()
        self._health = msgspec.structs.replace(self._health, num_replacements=0)

    def follow(self, facts: ReplicaFacts) -> None:
        """Hears what the front that starts the engine says of it."""
        if facts.failure is not None and self._is_starting:
            self._give_up(facts.failure)

    def hand_over(self, request_ids: Sequence[str]) -> None:
        """Ends the streams of these requests with Moved."""
        self._streams.hand_over(request_ids)

    def restart(self, reason: str) -> None:
        """Ends the engine and starts another one in the state that it had. What was not handed over waits for it."""
        if not self._is_starting and not self._is_closed:
            self._replace(reason, is_suspicious=False)

    @property
    def is_replacing(self) -> bool:
        """Says whether an engine is being started; none is after the client was closed."""
        return self._health.state == "replacing" and not self._is_closed

    def restart_like(self, other: ReplicaClient, reason: str) -> None:
        """Restarts the engine in the state of another replica's."""
        self.take_state(other)
        self.restart(reason)

    def park(self) -> None:
        """Has no engine until `suspension.resume` brings one; called in place of `start`."""
        self.suspension.is_on = True
        self._turn("unloaded")
        self._tasks["watch"] = asyncio.create_task(self._watch())

    async def release(self) -> None:
        """Gives back what its engine had a place in; called once it is suspended."""

    def take_state(self, other: ReplicaClient) -> None:
        """Has the next engine be in the state of another replica's."""
        self._streams.journal = other._streams.journal.copy()

    def has_state_of(self, other: ReplicaClient) -> bool:
        """Says whether operators have done the same to both."""
        return vars(self._streams.journal) == vars(other._streams.journal)

    def _turn(self, state: State, reason: str = "") -> None:
        before = self._health.state
        super()._turn(state, reason)
        self._on_turn(before, state)


class OpenReplicaClient(ReplicaClient):
    """The client of a replica whose engine other fronts use, too: they come in at its door."""

    def _open(self) -> None:
        super()._open()
        assert isinstance(self._host, ProcessHost)
        self._host.admit()

    def watch_for(self, num_elsewhere: Callable[[], int]) -> None:
        """Takes the engine for hung also when nothing comes of the requests of other fronts. num_elsewhere: returns
        how many tokens it is to compute for them."""
        assert isinstance(self._streams, UnblamedStreams)
        self._streams.num_elsewhere = num_elsewhere


class Replica:
    """One engine of several, and what it was given."""

    def __init__(self, number: int, settle: Callable[[], None], company: Company) -> None:
        """settle: has requests of replicas that are drained or not well go on in others."""
        self.number = number
        self._settle = settle
        self._company = company
        self.client: ReplicaClient
        self._is_drained = False
        self._told: ReplicaFacts | None = None  # by the front that owns it, where that is another one
        self._absences: list[bool] = []  # restarts that have not ended, and, True, exchanges of weights
        self.weights = 0  # the number of exchanges that its weights come from
        self.weight_version: str | None = None  # of its weights, while not all replicas have the same
        self.weights_fault = ""  # why it got the newest weights by a restart
        self.passages: dict[str, Passage] = {}  # by the ids that its engine knows
        self.load = 0  # tokens that it is to compute for this front
        self.load_elsewhere = 0  # the same for other fronts, as they said last
        self.num_given = 0  # tokens that it was ever given to compute

    def drive_by(self, client: ReplicaClient) -> None:
        """Has its engine driven by a client."""
        self.client = client
        if isinstance(client, OpenReplicaClient):
            client.watch_for(lambda: self.load_elsewhere)

    @property
    def is_drained(self) -> bool:
        """Says whether it is given nothing any more, because an operator drains or restarts it."""
        is_told = self._told is not None and self._told.is_drained
        return self._is_drained or bool(self._absences) or is_told

    @property
    def is_parked(self) -> bool:
        """Says whether it has no engine, because there is too little to compute; or so the owner says."""
        is_told = self._told is not None and self._told.is_parked
        return is_told or self.client.health.state == "unloaded"

    @property
    def is_closed(self) -> bool:
        """Says whether another front exchanges its weights."""
        return self._told is not None and self._told.is_exchanging

    @property
    def total_load(self) -> int:
        """The number of tokens that it is to compute, for all fronts."""
        return self.load + self.load_elsewhere

    @property
    def facts(self) -> ReplicaFacts:
        """The facts that all fronts are to know."""
        return ReplicaFacts(
            is_drained=self.is_drained,
            is_parked=self.is_parked,
            is_exchanging=any(self._absences),
            weights=self.weights,
            weight_version=self.weight_version,
            failure=self.client.failure,
            engine_id=self.client.engine_id,
            address=self.client.address,
        )

    def follow(self, facts: ReplicaFacts) -> None:
        """Hears the facts from the front that owns the engines."""
        self._told = facts
        self.weights, self.weight_version = facts.weights, facts.weight_version
        self.client.follow(facts)

    @property
    def label(self) -> str:
        """Its name in metrics and messages."""
        return str(self.number)

    @property
    def role(self) -> EngineRole:
        return self.client.role

    @property
    def hardware(self) -> str:
        """Names device, instruction set and formats of numbers: what its output depends on beside the weights."""
        info = self.client.info
        return " ".join(filter(None, (info.device, info.processor, info.dtype, info.activations)))

    @property
    def health(self) -> EngineHealth:
        return self.client.health

    @property
    def stats(self) -> EngineStats:
        return self.client.stats

    @property
    def num_live(self) -> int:
        return self.client.num_live

    async def call(self, op: str, **args: Any) -> object:
        return await self.client.call(op, **args)

    def drain(self, *, is_drained: bool) -> None:
        """Gives it nothing any more, where there are others, and has its requests go on in them; or ends that."""
        self._is_drained = is_drained
        self._settle()

    async def restart(self) -> None:
        """Ends the engine and starts it again, in the state that it had. Returns when it is there, or could not be
        started. Its requests go on in others, or wait where there are none."""
        async with self.away():
            self.client.restart("an operator is restarting it")
            while self.client.is_replacing:
                await asyncio.sleep(TICK_S)
            await self._company.tell()
            while not self.client.is_replacing and await self._company.ask("starts", self):
                await asyncio.sleep(TICK_S)

    @contextlib.asynccontextmanager
    async def away(self, *, for_weights: bool = False) -> AsyncIterator[None]:
        """Gives it nothing meanwhile, where there are others; what it has goes on in them, where it may.

        for_weights: other fronts give it nothing either where there are no others, since they would not know which
        weights answer.
        """
        self._absences.append(for_weights)
        self._settle()
        try:
            await self._company.tell()
            yield
        finally:
            self._absences.remove(for_weights)
            self._settle()


class Passage:
    """A request on its way through one replica, or several."""

    def __init__(self, request: GenerateRequest, watch: Watch | None, pages: tuple[int, ...]) -> None:
        self.live = Live(request, time.monotonic())
        self.watch = watch
        self.pages = pages
        self.replica: Replica | None = None
        self.attempt_id = request.id
        self.has_ended = False
        self.abort_reason: str | None = None
        self.num_moves = 0
        self.num_saved = 0  # of its pages that were computed for it elsewhere, and can be read by its replica
        self.prompt_times: Timeline | None = None  # of the engine that computed these
        self.weights: int | None = None  # those of the replica whose output was sent; None before any was
        self.hardware: list[str] = []  # that has computed what was sent
        self.num_deaths = 0  # of engines under it
        self._left = 0  # of the tokens that its replica is to compute for it
        self._num_uncached = 0  # of these, tokens of the prompt

    def continued(self, rest: GenerateRequest) -> GenerateRequest:
        """Returns what is left of a request for another replica: under an id of its own, with what is left of its
        time."""
        passed_ms = int(1000 * (time.monotonic() - self.live.arrived_s))
        total_ms, first_ms = (
            None if limit_ms is None else max(1, limit_ms - passed_ms)
            for limit_ms in (rest.deadline_ms, rest.ttft_deadline_ms)
        )
        return msgspec.structs.replace(rest, id=self.attempt_id, deadline_ms=total_ms, ttft_deadline_ms=first_ms)

    def may_move_to(self, others: Sequence[Replica]) -> bool:
        """Says whether the request may go on in one of these replicas."""
        is_free = self.num_moves < MOST_MOVES and self.num_deaths <= STAYS_AFTER
        return is_free and any(self.may_be_in(other) for other in others)

    def may_be_in(self, replica: Replica) -> bool:
        """Says whether a replica has the weights that the output so far was computed with."""
        return self.weights is None or self.weights == replica.weights

    def heard_of(self, replica: Replica) -> Watch | None:
        """Returns the function that hears of tokens of a replica, of the weights that they come from, and of hardware
        other than before."""
        if self.watch is None:
            return None
        news: dict[str, Any] = {}
        if replica.weight_version is not None:
            news["weight_version"] = replica.weight_version
        hardware = self.hardware_with(replica)
        if len(hardware) > 1:
            news["hardware"] = tuple(hardware)
        return partial(self.watch, **news) if news else self.watch

    def as_asked(self, delta: OutputDelta) -> OutputDelta:
        """Returns what an engine sends as the client is to have it: under the request's own id, and with the times of
        the engine that computed the prompt."""
        if delta.timeline is not None and self.prompt_times is not None:
            timeline = msgspec.structs.replace(delta.timeline, prompt=self.prompt_times)
            delta = msgspec.structs.replace(delta, timeline=timeline)
        asked_id = self.live.request.id
        return delta if delta.id == asked_id else msgspec.structs.replace(delta, id=asked_id)

    def hardware_with(self, replica: Replica) -> list[str]:
        """Returns the hardware that has computed what was sent, then a replica's, where it is another."""
        return self.hardware if self.hardware[-1:] == [replica.hardware] else [*self.hardware, replica.hardware]

    def enter(self, replica: Replica, num_uncached: int, num_left: int) -> None:
        """Goes to a replica, which has `num_left` tokens of it to compute, `num_uncached` before the first new one."""
        self.replica = replica
        self.attempt_id = self.live.request.id if not self.num_moves else f"{self.live.request.id}~{self.num_moves}"
        self._num_uncached, self._left = num_uncached, num_left
        replica.load += num_left
        replica.num_given += num_left
        replica.passages[self.attempt_id] = self

    def note(self, num_tokens: int) -> None:
        """Notes that tokens have come."""
        done = min(self._left, num_tokens + self._num_uncached)
        self._num_uncached = 0
        self._left -= done
        assert self.replica is not None
        self.replica.load -= done

    def leave(self) -> None:
        """Leaves its replica."""
        if self.replica is not None:
            self.replica.load -= self._left
            del self.replica.passages[self.attempt_id]
            self.replica = None
