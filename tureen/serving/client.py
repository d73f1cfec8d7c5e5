"""The one interface behind which an engine runs: in a thread, in a child process, elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from tureen.contract.types import EngineHealth, EngineInfo, EngineRole, EngineStats, GenerateRequest, OutputDelta
from tureen.serving.streams import Interval, Watch


class ReplicaFacts(msgspec.Struct, frozen=True):
    """The facts about one of several engines that all fronts are to know."""

    is_drained: bool
    is_parked: bool  # it has no engine
    is_exchanging: bool  # its weights: what has none yet is not given to it, whatever becomes of the others
    weights: int  # the number of exchanges that its weights come from
    weight_version: str | None  # of its weights, while not all replicas have the same
    failure: str | None  # why no engine is to be expected
    engine_id: str  # of an engine elsewhere that is in the state that it is to be in
    address: str = ""  # where an engine in an actor listens; "" = nowhere now, or it is in no actor


class ReplicaView(Protocol):
    """One of several engines, as an operator sees it."""

    number: int
    weights_fault: str  # why it got the newest weights by a restart; "" = it did not

    @property
    def role(self) -> EngineRole: ...

    @property
    def health(self) -> EngineHealth: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_live(self) -> int: ...

    @property
    def total_load(self) -> int:
        """The number of tokens that it is to compute, for all fronts."""

    @property
    def is_drained(self) -> bool:
        """Says whether it is given nothing any more."""

    @property
    def facts(self) -> ReplicaFacts:
        """The facts that other fronts are to know."""

    async def call(self, op: str, **args: Any) -> object:
        """Runs an operation of its engine that changes nothing."""

    def drain(self, *, is_drained: bool) -> None:
        """Gives it nothing any more, and has its requests go on in others; or gives it requests again."""

    async def restart(self) -> None:
        """Ends the engine and starts it again; returns when it is there, or failed. Its requests go on in others."""


class EngineClient(Protocol):
    """Drives one engine. All methods are called on the event loop's thread."""

    info: EngineInfo

    def generate(
        self, request: GenerateRequest, interval: Interval = 1, watch: Watch | None = None
    ) -> AsyncIterator[OutputDelta]:
        """Submits a request and streams its output. Ends after the delta with `finish`.

        Closing the iterator early aborts the request. A delta brings at least `interval` tokens, but for the first and
        the last. `watch` is called as tokens come in.

        When the engine is lost, the stream pauses and goes on in another one: see docs/reliability.md.

        Raises Unavailable when there is no engine, TureenError subclasses when it refuses the request or cannot go on.
        """

    def abort(self, request_id: str, reason: str = "client") -> None:
        """Ends a request. Does nothing for an unknown id."""

    async def call(self, op: str, **args: Any) -> object:
        """Runs a control operation of the engine (`flush_cache`, `stats`, …) and returns its result."""

    @property
    def failure(self) -> str | None:
        """The reason why requests are refused; None while they are taken."""

    @property
    def health(self) -> EngineHealth:
        """The state of the engine now."""

    @property
    def stats(self) -> EngineStats:
        """The figures of the newest step."""

    @property
    def num_live(self) -> int:
        """The number of requests that were submitted and have not ended, known without asking the engine."""

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """The engines behind it, where there are several; else none."""

    async def close(self) -> None: ...
