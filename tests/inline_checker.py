"""A checker of constrained outputs without a process of its own: the real judgement, in the call."""

from __future__ import annotations

from tureen.grammar import GrammarSpec
from tureen.grammar_service import check
from tureen.grammar_service.check import CheckVerdict


class InlineChecker:
    """See Checker."""

    supervisor = None  # it has no processes

    def __init__(self) -> None:
        self.unverified = 0

    def check(self, spec: GrammarSpec, text: str) -> CheckVerdict:
        verdict = check._judge(spec, text)
        self.unverified += not verdict.is_verified
        return verdict

    async def check_in_turn(self, spec: GrammarSpec, text: str) -> CheckVerdict:
        return self.check(spec, text)

    def close(self) -> None:
        """There is nothing to end."""
