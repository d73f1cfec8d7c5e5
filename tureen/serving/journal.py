"""Records the operations that changed an engine since its start, to repeat them on the one that replaces it."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tureen.contract.types import EngineInfo
from tureen.errors import Conflict, TureenError
from tureen.log import get_logger

log = get_logger("serving")

Do = Callable[..., Awaitable[object]]


class Journal:
    """The state that control operations have made, not their history."""

    def __init__(self) -> None:
        self._files: tuple[tuple[str, int, int], ...] | None = None  # of the weights of the start
        self._weights: Mapping[str, Any] | None = None  # None: those of the start
        self._adapters: Mapping[str, str] | None = None  # name -> path; None: those of the start
        self._released: set[str] = set()
        self._marks: dict[str, Mapping[str, Any]] = {}  # operations that last until another one undoes them

    def note(self, op: str, args: Mapping[str, Any], value: Any) -> None:
        """Records an operation that the engine has done: its name, arguments and result."""
        if op == "update_weights":
            self._weights = args
            self._released.discard("weights")
        elif op in ("load_adapter", "unload_adapter"):
            self._adapters = dict(value)
        elif op == "release_memory":
            self._released.update(args["tags"])
        elif op == "resume_memory":
            self._released.difference_update(args["tags"])
        elif op == "pause":
            self._marks["pause"] = {"mode": "in_place"}
        elif op == "hold":
            self._marks["hold"] = {}
        elif op in ("resume", "let_go"):
            self._marks.pop({"resume": "pause", "let_go": "hold"}[op], None)

    @property
    def has_other_weights(self) -> bool:
        """Whether the engine was given other weights than those of the start."""
        return self._weights is not None

    def copy(self) -> Journal:
        """Returns another one that says the same."""
        return copy.deepcopy(self)

    async def replay(self, do: Do, info: EngineInfo) -> None:
        """Brings a new engine to the state of the old one. `do` runs an operation on it.

        Raises TureenError when it cannot have the weights.
        """
        if self._files is None:
            self._files = info.files
        if self._weights is None and info.files != self._files:
            raise Conflict(
                "the model's files have changed since the server was started; start it again to serve them",
                code="weights_changed",
            )
        if self._weights is not None:
            await do("update_weights", **self._weights)
        await self._replay_adapters(do, info.adapters)
        if self._released:
            await do("release_memory", tags=sorted(self._released))
        for op, args in self._marks.items():
            await do(op, **args)

    async def _replay_adapters(self, do: Do, there: Mapping[str, str]) -> None:
        """Loads the adapters again. One that cannot be loaded is missed by those that ask for it, not by all."""
        adapters = there if self._adapters is None else self._adapters
        for name in there.keys() - adapters.keys():
            await do("unload_adapter", name=name)
        for name, path in adapters.items():
            if there.get(name) == path:
                continue
            try:
                if name in there:
                    await do("unload_adapter", name=name)
                await do("load_adapter", name=name, path=path)
            except TureenError as error:
                log.error("the replacement has no adapter %s: %s", name, error.message)
