"""Keeps the loaded LoRA adapters, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from tureen.engine.sequence import Sequence
from tureen.errors import Conflict, InvalidRequest, echo, not_loaded

NO_ADAPTER = 0
MAX_NAME_CHARS = 256
PATH_FIELD = "lora_path"
NO_NAME = "None"  # MindIE's clients send it for the model without an adapter


class Caller(Protocol):
    """The part of the runner that executes control operations."""

    def call(self, op: str, **args: Any) -> object:
        """Runs the runner's control operation `op` with these arguments; returns its result."""


class Loaded(NamedTuple):
    """An adapter in memory: its number in the runner, and the folder that it was read from."""

    number: int  # never reused, so nothing cached for another adapter can match it
    path: str


class Adapters:
    """Loads and unloads adapters by name. All loaded adapters stay in memory."""

    def __init__(self, runner: Caller, users: Collection[Sequence]) -> None:
        """users: a view of all sequences that have not ended."""
        self._runner = runner
        self._users = users
        self._loaded: dict[str, Loaded] = {}
        self._last_number = NO_ADAPTER
        self.heed: Callable[[str, str], None] | None = None  # called with the number and path of each loaded adapter

    def load(self, name: str, path: str) -> dict[str, str]:
        """Loads the adapter in the folder `path` under `name`. Returns all loaded adapters, name -> path.

        Raises InvalidRequest, and changes nothing, if it cannot be loaded.
        """
        if not (1 <= len(name) <= MAX_NAME_CHARS and name.isprintable()):
            raise InvalidRequest(
                f"lora_name must be 1 to {MAX_NAME_CHARS} printable characters, got {echo(name)}", field="lora_name"
            )
        if name == NO_NAME:
            raise InvalidRequest(
                f"lora_name {echo(name)} means 'no adapter' to some clients; choose another", field="lora_name"
            )
        if name in self._loaded:
            raise InvalidRequest(
                f"lora_name {echo(name)} is already loaded; unload it first, or choose another name", field="lora_name"
            )
        self._last_number += 1
        self._runner.call("load_adapter", number=self._last_number, path=path)
        self._loaded[name] = Loaded(self._last_number, path)
        if self.heed is not None:
            self.heed(str(self._last_number), path)
        return self.paths()

    def unload(self, name: str) -> dict[str, str]:
        """Unloads the adapter of that name. Returns all loaded adapters, name -> path.

        Raises NotFound for an unknown name, and Conflict while requests use it.
        """
        if name not in self._loaded:
            raise not_loaded(name, "lora_name")
        number = self._loaded[name].number
        num_users = sum(user.terms.adapter == number for user in self._users)
        if num_users:
            raise Conflict(
                f"lora_name {echo(name)}: {num_users} requests use it; wait for them, or abort them",
                field="lora_name",
                code="lora_in_use",
            )
        self._runner.call("unload_adapter", number=number)
        del self._loaded[name]
        return self.paths()

    def paths(self) -> dict[str, str]:
        """Returns name -> path, in the order in which the adapters were loaded."""
        return {name: loaded.path for name, loaded in self._loaded.items()}

    def number_of(self, name: str) -> int:
        """Returns the number of the adapter of that name, or that was loaded from that path. Raises NotFound."""
        by_path = (adapter for adapter in self._loaded.values() if adapter.path == name)
        loaded = self._loaded.get(name) or next(by_path, None)
        if loaded is None:
            raise not_loaded(name, PATH_FIELD)
        return loaded.number
