"""The helper processes of the front itself: one that judges constrained outputs, those that decode pictures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tureen.log import get_logger
from tureen.media.loader import MediaLoader
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.supervisor import helpers_down

if TYPE_CHECKING:
    from tureen.constraining.check import Checker, CheckVerdict
    from tureen.grammar import GrammarSpec

log = get_logger("http")


class Helpers:
    """Started when they are first needed; together they take no more memory than the budget."""

    def __init__(self, media: MediaLoader | None, budget: MemoryBudget) -> None:
        self._media = media
        self._budget = budget
        self._checker: Checker | None = None
        self._num_unchecked = 0
        if media is not None:
            media.supervisor.share(budget)

    async def check(self, spec: GrammarSpec, text: str) -> CheckVerdict | None:
        """What in a constrained output does not fit; None, but counted, without a process that judges."""
        try:
            checker = self.checker
        except OSError as error:
            log.error("constrained outputs are not checked a second time: %s", error.strerror)
            self._num_unchecked += 1
            return None
        return await checker.check_in_turn(spec, text)

    @property
    def checker(self) -> Checker:
        """Judges constrained outputs. Raises OSError where the system gives it nothing to do so with."""
        if self._checker is None:
            from tureen.constraining.check import Checker  # noqa: PLC0415 - with it come the libraries that judge

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
        return self._num_unchecked + (0 if self._checker is None else self._checker.unverified)

    async def close(self) -> None:
        """End them."""
        if self._checker is not None:
            await asyncio.to_thread(self._checker.close)
        if self._media is not None:
            await self._media.close()
