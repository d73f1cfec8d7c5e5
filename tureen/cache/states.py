"""Saved states of layers without attention: numbers that are free, or held by the node of the page before the state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Protocol

from tureen.cache.pages import Held


class StateHolder(Protocol):
    """A node of the prefix cache. `state`: the state after its page; None: none is saved."""

    state: Held | None


class SavedStates:
    """Allocates and frees the numbers of saved states. Evicts the least recently used state."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = frozenset(numbers)
        self.free = sorted(self.numbers, reverse=True)
        self.taken: set[int] = set()  # no node holds them yet, because rows or loads still write them
        self.held: OrderedDict[StateHolder, None] = OrderedDict()
        """The nodes that hold a state, in LRU order. Changed by this class only."""

    def take(self, in_use: Collection[int]) -> int | None:
        """Takes a number, from the node with the least recently used state if none is free. None: all are in use.

        in_use: numbers that a running sequence begins with.
        """
        number = next((number for number in reversed(self.free) if number not in in_use), None)
        if number is None:
            oldest = next((node for node in self.held if _number_of(node) not in in_use), None)
            if oldest is None:
                return None
            number = _number_of(oldest)
            self.drop(oldest)
        self.free.remove(number)
        self.taken.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Frees a number that no node holds."""
        self.taken.remove(number)
        self.free.append(number)

    def hold(self, node: StateHolder, number: int) -> bool:
        """Stores the state at the node. If the node already has one, which is the same, frees the number and returns
        False."""
        if node.state is not None:
            self.give_back(number)
            return False
        self.taken.remove(number)
        node.state = Held(number)
        self.held[node] = None
        return True

    def touch(self, node: StateHolder) -> None:
        """Marks the node's state, if it has one, as the most recently used."""
        if node in self.held:
            self.held.move_to_end(node)

    def drop(self, node: StateHolder) -> None:
        """Removes the node's state, if it has one."""
        if node.state is not None:
            del self.held[node]
            self.free.append(node.state.number)
            node.state = None

    def check(self, nodes: Iterable[StateHolder]) -> list[str]:
        """Verifies that each number is free, taken or held by one node of the tree. Returns the errors."""
        numbers = [*self.free, *self.taken, *map(_number_of, self.held)]
        wrong = [] if sorted(numbers) == sorted(self.numbers) else ["a saved state is lost, or has two holders"]
        if {node for node in nodes if node.state is not None} != set(self.held):
            wrong.append("the nodes that hold a state are not those of the tree that have one")
        return wrong


def _number_of(node: StateHolder) -> int:
    return -1 if node.state is None else node.state.number
