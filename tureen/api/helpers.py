"""The helper processes of the front itself: one that judges constrained outputs, those that decode pictures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tureen.media.loader import MediaLoader
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.supervisor import helpers_down

if TYPE_CHECKING:
    from tureen.grammar.check import Checker


class Helpers:
    """Started when they are first needed; together they take no more memory than the budget."""

    def __init__(self, media: MediaLoader | None, budget: MemoryBudget) -> None:
        self._media = media
        self._budget = budget
        self._checker: Checker | None = None
        if media is not None:
            media.supervisor.share(budget)

    @property
    def checker(self) -> Checker:
        """Judges constrained outputs."""
        if self._checker is None:
            from tureen.grammar.check import Checker  # noqa: PLC0415 - with it come the libraries that judge

            self._checker = Checker()
            self._checker.supervisor.share(self._budget)
        return self._checker

    @property
    def down(self) -> tuple[str, ...]:
        """Those that are being replaced, in words."""
        return helpers_down(*(one.supervisor for one in (self._checker, self._media) if one is not None))

    @property
    def num_unverified(self) -> int:
        """Constrained outputs that could not be judged in time."""
        return 0 if self._checker is None else self._checker.unverified

    async def close(self) -> None:
        """End them."""
        if self._checker is not None:
            await asyncio.to_thread(self._checker.close)
        if self._media is not None:
            await self._media.close()
