"""Owns the helper processes of the server process: one checks constrained outputs, others decode pictures or render
chat templates."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tureen.log import get_logger
from tureen.media.loader import MediaLoader
from tureen.requests import template_pool
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.supervisor import helpers_down

if TYPE_CHECKING:
    from tureen.grammar import GrammarSpec
    from tureen.grammar_service.check import Checker, CheckVerdict

log = get_logger("http")


class Helpers:
    """The server's helper processes. They start when first needed and share one memory budget."""

    def __init__(self, media: MediaLoader | None, budget: MemoryBudget) -> None:
        self._media = media
        self._budget = budget
        self._checker: Checker | None = None
        self._num_unchecked = 0
        if media is not None:
            media.supervisor.share(budget)
        self._templates = template_pool.join()
        if self._templates is not None:
            self._templates.share(budget)

    async def check(self, spec: GrammarSpec, text: str) -> CheckVerdict | None:
        """Checks a constrained output in a separate process, and returns its mismatches.

        Returns None, and counts the output, if no process could check it or the check took too long.
        """
        try:
            checker = self.checker
        except OSError as error:
            log.error("constrained outputs get no second check: %s", error.strerror)
            self._num_unchecked += 1
            return None
        return await checker.check_in_turn(spec, text)

    @property
    def checker(self) -> Checker:
        """Client of the process that checks constrained outputs. Raises OSError when the system cannot start it."""
        if self._checker is None:
            from tureen.grammar_service.check import Checker  # noqa: PLC0415 - imports the validation libraries

            self._checker = Checker()
            self._checker.supervisor.share(self._budget)
        return self._checker

    @property
    def down(self) -> tuple[str, ...]:
        """Names of helper processes that ended and are being replaced, as the health report shows them."""
        helpers = (self._checker, self._media, self._templates)
        return helpers_down(*(helper.supervisor for helper in helpers if helper is not None))

    @property
    def num_unverified(self) -> int:
        """Number of constrained outputs that were sent unchecked."""
        return self._num_unchecked + (0 if self._checker is None else self._checker.unverified)

    async def close(self) -> None:
        """Ends the helper processes. The processes that render chat templates end with the last server of this
        process."""
        templates, self._templates = self._templates, None
        if templates is not None and template_pool.leave(templates):
            await asyncio.to_thread(templates.close)
        if self._checker is not None:
            await asyncio.to_thread(self._checker.close)
        if self._media is not None:
            await self._media.close()
