"""The models of a server by their names, and those that join them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from tureen.errors import Conflict, NotFound, StartupError
from tureen.log import get_logger
from tureen.multi_model.member import Member
from tureen.requests.model_field import ANY, unknown_model

log = get_logger("fleet")


class Starter(Protocol):
    """Finds models, and starts their engines. Its methods raise StartupError."""

    async def measure(self, member: Member, share_bytes: int) -> int:
        """Finds a model's files and returns the bytes that it needs of its share."""

    async def launch(self, member: Member) -> None:
        """Starts a model's engine, which then is ready."""

    def adopt(self, name: str) -> Member:
        """Returns a model that the server was not started with."""


class Register:
    """The models of one server, in the order of the settings. The first is the default model."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)

    def find(self, name: str) -> Member | None:
        """Returns the model that a request's `model` means; None: there is none. See ModelNames."""
        if name in ANY:
            return self.members[0]
        exact = (member for member in self.members if member.name == name)
        return next(exact, None) or next(
            (member for member in self.members if member.names.adapter(name) is not None), None
        )

    def names(self) -> list[str]:
        """Returns the names that requests may use: models and their adapters."""
        return [name for member in self.members for name in (member.name, *member.adapters)]

    def named(self, name: str) -> Member:
        """Returns the model that an operator names. Raises NotFound."""
        member = self.find(name)
        if member is None:
            raise unknown_model(name, self.names())
        return member

    async def named_or_new(self, name: str, starter: Starter, measure: Callable[[Member], Awaitable[int]]) -> Member:
        """Returns the model that an operator names; one that is not among them joins when its files are there.

        measure: fetches them, and sees whether the model can fit. Raises NotFound where there is no such model,
        InvalidRequest where it can never fit, Conflict where another one has its name.
        """
        member = self.find(name)
        if member is not None:
            return member
        try:
            member = await asyncio.to_thread(starter.adopt, name)
            await measure(member)
        except StartupError as error:
            why = f"{unknown_model(name, self.names()).message}; as a model to add: {error.message}"
            raise NotFound(why, field="model", code="model_not_found") from None
        known = self.find(name)  # another may have been quicker
        if known is not None:
            return known
        if self.find(member.name) is not None:
            raise Conflict(
                f"another model has the name {member.name}; give this one a name in a [[models]] table of --config",
                field="model",
                code="name_in_use",
            )
        self.members.append(member)
        log.info("model %s: joined the others", member.name)
        return member
