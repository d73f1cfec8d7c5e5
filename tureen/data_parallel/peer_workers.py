"""Has the routers of several fronts over the same engines agree: one owns the engines, tells and asks the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tureen.data_parallel.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from tureen.serving.client import ReplicaFacts

Question = Literal["holds", "needs", "starts"]
"""A question about a replica. `holds`: whether it has requests. `needs`: whether it has any, or some that are between
two replicas can go on in one with its weights only. `starts`: whether its engine is waited for."""


class OtherRouters(Protocol):
    """The routers of other fronts, as the owner reaches them."""

    async def tell(self) -> None:
        """Has them know the facts of now about all replicas; returns when they do."""

    async def any_says(self, question: Question, number: int) -> bool:
        """Says whether the answer of any of them is yes."""


class Company:
    """The fronts over the same engines, as one of them sees them: alone, unless it is told of others."""

    def __init__(self, replicas: Sequence[Any], passages: Mapping[str, Any]) -> None:
        """replicas: all, as they are there later. passages: requests of this front, by id, those too that are between
        two replicas."""
        self.others: OtherRouters | None = None  # where this front owns the engines
        self.prefixes = PrefixIndex(0, 1, 0)  # what each replica has cached
        self._replicas = replicas
        self._passages = passages

    async def tell(self) -> None:
        """Has the others know the facts of now; returns when they do."""
        if self.others is not None:
            await self.others.tell()

    async def ask(self, question: Question, replica: Any) -> bool:
        """Asks all fronts. Returns whether any answer is yes."""
        if self.says(question, replica.number):
            return True
        return self.others is not None and await self.others.any_says(question, replica.number)

    def says(self, question: Question, number: int) -> bool:
        """Answers a question for this front."""
        replica = self._replicas[number]
        if question == "starts":
            return bool(replica.client.is_replacing)
        return bool(replica.num_live) or (
            question == "needs"
            and any(each.weights == replica.weights and each.replica is not replica for each in self._passages.values())
        )

    def follow(self, facts: Sequence[ReplicaFacts]) -> None:
        """Hears the facts about the replicas from the front that owns them, where it is another one."""
        for replica, told in zip(self._replicas, facts, strict=bool(facts)):
            replica.follow(told)

    def hear_others(self, loads: Sequence[int], news: Iterable[Sequence[Sequence[int]]]) -> None:
        """Hears how many tokens each replica is to compute for other fronts, and what they have given to each."""
        for replica, load in zip(self._replicas, loads, strict=True):
            replica.load_elsewhere = load
        for pages in news:
            self.prefixes.hear(pages)
