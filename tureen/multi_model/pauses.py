"""Pauses of all models, for those that are not loaded when an operator asks for one."""

from __future__ import annotations

from collections.abc import Sequence

from tureen.multi_model.member import Member


class Pauses:
    """Has a model do what was asked for of all models while it was not loaded: hold generation up, or let it go on."""

    def __init__(self, members: Sequence[Member]) -> None:
        """`members`: all models; more may join."""
        self._members = members
        self._is_paused = False
        self._up_to_date: set[Member] | None = None  # those that have heard of the last operation; None: there was none

    def note(self, *, is_paused: bool) -> None:
        """Hears of an operation on all models, which those that are loaded do by themselves."""
        self._is_paused = is_paused
        self._up_to_date = {member for member in self._members if member.standing == "loaded"}

    async def catch_up(self, member: Member) -> None:
        """Brings a model whose engine has just been started to the state of the others."""
        client = member.client
        while client is not None and self._up_to_date is not None and member not in self._up_to_date:
            self._up_to_date.add(member)
            await (client.call("pause", mode="in_place") if self._is_paused else client.call("resume"))
