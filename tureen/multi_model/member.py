"""One of several models: its engine, whether it is loaded, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tureen.clients.quotas import current_work
from tureen.config import Config
from tureen.config_facts import adapter_of
from tureen.errors import TureenError
from tureen.http.dialect import Entry
from tureen.multi_model.sharing import CommonWeights
from tureen.requests.model_field import ModelNames
from tureen.requests.state import ServerState, Standing
from tureen.serving.healing import HealingClient

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Seconds after a load that failed in which no other is tried: at first, and at most; doubled each time."""


class Waiter:
    """A request that waits until its model is loaded."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.holds = False  # the model is loaded, and counts this one among its users
        self.work = current_work()
        self.outputs: Sequence[Any] = (None,)  # it takes one place, whatever its body asks for

    def refuse(self, error: TureenError) -> None:
        """End the wait with an error."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # it may have left


class Loads:
    """The loads of one model: how many there were, and what became of the last one. Times are the loop's."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0  # that the last one took
        self.phase = ""  # of the one that runs
        self.failure = ""  # why the last one failed
        self.retry_s = 0.0  # when the next one may be tried
        self.is_asked_for = False  # to be loaded although no request waits, for example by an operator
        self._num_failures = 0  # in a row

    def note_phase(self, phase: str, done: int, total: int) -> None:
        """Hears how far a load is; see Progress."""
        self.phase = f"{phase} {done}/{total}" if total > 1 else phase

    def fail(self, reason: str, now_s: float) -> None:
        """Notes a load that failed."""
        self._num_failures += 1
        self.failure = reason
        self.retry_s = now_s + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (self._num_failures - 1))

    def succeed(self, seconds: float) -> None:
        """Notes a load that took so long."""
        self._num_failures, self.failure, self.retry_s = 0, "", 0.0
        self.count += 1
        self.seconds = seconds


class Member:
    """One of a server's models. Event-loop thread only."""

    def __init__(self, config: Config, name: str, *, own: frozenset[str] = frozenset()) -> None:
        """`own`: names of the settings that this model was given; the others are the server's."""
        self.name = name
        self.config = config
        self.own = own
        self.standing: Standing = "unloaded"
        self.is_leaving = False  # it is to be unloaded: who comes now waits until it is loaded again
        self.client: HealingClient | None = None  # None: it was never loaded
        self.state: ServerState | None = None
        self.entries: list[Entry] = []  # its routes, in the order of the default model's
        self.need_bytes = 0
        self.share: CommonWeights | None = None  # its weights at the start, where another model has the same
        self.num_users = 0  # requests for which it was chosen, and whose answer has not begun
        self.used_s = 0.0  # when it was used last, by the loop's clock
        self.loads = Loads()
        self.is_retiring = False  # it is unloaded after its last request
        self.waiters: dict[Waiter, None] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a request may use it now."""
        return self.standing == "loaded" and not self.is_leaving

    @property
    def shared(self) -> CommonWeights | None:
        """Its weights, where another model has the same; None also when it was given others."""
        return None if self.client is not None and self.client.suspension.has_other_weights else self.share

    @property
    def is_busy(self) -> bool:
        """Whether a request uses it."""
        return bool(self.num_users) or (self.client is not None and self.client.suspension.is_busy)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for it."""
        return self.loads.is_asked_for or bool(self.waiters)

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that requests may ask for: name -> path; before the first load as the settings say."""
        if self.state is not None:
            return self.state.adapters
        return dict(adapter_of(setting) for setting in self.config.lora_paths)

    @property
    def names(self) -> ModelNames:
        """The names that mean it."""
        paths = () if self.state is None else (self.state.context.info.model_path,)
        return ModelNames(self.name, (self.config.model_path, *paths), self.adapters)

    def enter(self) -> None:
        """Counts a user. The model is ready."""
        self.num_users += 1
        self.used_s = _now()

    def leave(self) -> None:
        """Counts a user no longer."""
        self.num_users -= 1
        self.used_s = _now()

    def admit(self) -> None:
        """Lets in all who wait: it is loaded."""
        self.loads.is_asked_for = False
        for waiter in self.waiters:
            if not waiter.done.done():
                waiter.holds = True
                self.enter()
                waiter.done.set_result(None)
        self.waiters.clear()

    def refuse(self, make_error: Callable[[], TureenError]) -> None:
        """Refuses all who wait, and what the engine was asked for beside them."""
        self.loads.is_asked_for = False
        for waiter in self.waiters:
            waiter.refuse(make_error())
        self.waiters.clear()
        if self.client is not None and self.standing == "unloaded":
            self.client.suspension.fail_waiting(make_error)

    def report(self) -> dict[str, Any]:
        """Returns what `/status` says of it."""
        now_s, client = _now(), self.client
        waits = [now_s - waiter.since_s for waiter in self.waiters]
        return {
            "name": self.name,
            "status": self.standing,
            "engine": "unloaded" if client is None else client.health.state,
            "memory_bytes": self.need_bytes or None,
            "shared_weights_bytes": None if self.shared is None else self.shared.num_bytes,
            "num_running": 0 if client is None else client.num_live,
            "num_waiting": len(waits),
            "longest_wait_s": round(max(waits, default=0.0), 3),
            "phase": self.loads.phase if self.standing == "loading" else None,
            "num_loads": self.loads.count,
            "load_seconds": round(self.loads.seconds, 3) if self.loads.count else None,
            "idle_s": round(now_s - self.used_s, 3) if self.standing == "loaded" and not self.is_busy else None,
            "failure": "the last load failed; the log says why" if self.loads.failure else None,
        }


def _now() -> float:
    return asyncio.get_running_loop().time()
