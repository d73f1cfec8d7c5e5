"""Declares what a router knows of the routers of other fronts, which use the same engines."""

from __future__ import annotations

from typing import Literal, Protocol

Question = Literal["holds", "needs", "starts"]
"""A question about a replica. `holds`: whether it has requests. `needs`: whether it has any, or some that are between
two replicas can go on in one with its weights only. `starts`: whether its engine is waited for."""


class OtherRouters(Protocol):
    """The routers of other fronts, as the owner reaches them."""

    async def tell(self) -> None:
        """Has them know the facts of now about all replicas; returns when they do."""

    async def any_says(self, question: Question, number: int) -> bool:
        """Says whether the answer of any of them is yes."""


class NoOthers:
    """Stands for the others where there is one front, or this one is not the owner."""

    async def tell(self) -> None:
        """Does nothing."""

    async def any_says(self, question: Question, number: int) -> bool:
        """Returns False."""
        return False
