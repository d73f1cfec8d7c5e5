"""The steps by which a guard follows an object whose properties stand in tags to the JSON values of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tureen.grammar.fragments import apart
from tureen.grammar.guard.facts import NOWHERE, THE_END, FixedStep, FreeStep, GuardNode, KeyStep, Step, ValueStep
from tureen.grammar.schema.tagged import STYLES, TagStyle


class Untold(Exception):
    """It is not certain from the text where a value begins."""


class TaggedValue(NamedTuple):
    """A property's value: the node it is held to, and whether it may stand there as a text without quotes."""

    node: int = NOWHERE
    is_text: bool = True

    def moved(self, count: int) -> TaggedValue:
        """Returns it with the numbers of its nodes moved by an offset."""
        return self if self.node == NOWHERE else self._replace(node=self.node + count)


class TaggedValues(NamedTuple):
    """The values of an object whose properties stand in tags."""

    keys: Mapping[str, TaggedValue]
    others: TaggedValue

    def moved(self, count: int) -> TaggedValues:
        """Returns them with the numbers of their nodes moved by an offset."""
        return TaggedValues({key: value.moved(count) for key, value in self.keys.items()}, self.others.moved(count))


NOTHING_TOLD = TaggedValues({}, TaggedValue())
"""The values of an object in which nothing is guarded."""


def tagged_steps(
    style: str, values: TaggedValues, nodes: Sequence[GuardNode], follow: Sequence[tuple[bytes, int]], steps: list[Step]
) -> int:
    """Adds the steps through an object, behind which these texts and steps follow. Returns the first. Raises Untold."""
    known = STYLES[style]
    numbers = [value for value in (*values.keys.values(), values.others) if value.node != NOWHERE and value.is_text]
    if known.nests or (not known.types and any(nodes[value.node].step for value in numbers)):
        raise Untold
    return _TaggedSteps(known, follow, steps).start(values)


class _TaggedSteps:
    def __init__(self, style: TagStyle, follow: Sequence[tuple[bytes, int]], steps: list[Step]) -> None:
        self._style = style
        self._follow = follow
        self._steps = steps

    def start(self, values: TaggedValues) -> int:
        """Returns the step before each property."""
        members = self._added(FixedStep(()))
        head, _, tail = self._style.begin.partition("{}")
        groups = dict.fromkeys(self._style.types.values()) or {"": None}
        stops = [(text, group) for group in groups for text in _texts(tail.replace("{type}", group))]
        free = self._added(FreeStep(tuple((text, members) for text in _texts(self._style.end))))
        texts_only = {self._style.types.get("string", "")}

        def targets(value: TaggedValue) -> tuple[int, ...]:
            json = NOWHERE if value.node == NOWHERE else self._value(value, members, free)
            return tuple(
                free if json == NOWHERE or (self._style.types and group in texts_only) else json for _, group in stops
            )

        keys = {key: targets(value) for key, value in values.keys.items()}
        key = self._added(KeyStep(tuple(text for text, _ in stops), keys, targets(values.others)))
        begins = [(text, key) for text in _texts(head)]
        ends = [(text, then) for text, then in self._follow if text]
        fixed = [(gap + text, then) for text, then in (*begins, *ends) for gap in (b"", b"\n")]
        if not apart([text.decode() for text, _ in fixed]):
            raise Untold
        is_last = any(then == THE_END and not text for text, then in self._follow)
        self._steps[members] = FixedStep(tuple(fixed), THE_END if is_last else None)
        return members

    def _value(self, value: TaggedValue, members: int, free: int) -> int:
        gaps = (b"", b"\n") if self._style.wraps else (b"",)
        ends = tuple((gap + text, members) for text in _texts(self._style.end) for gap in gaps)
        is_mixed = value.is_text and not self._style.types
        return self._added(ValueStep(value.node, self._added(FixedStep(ends)), free if is_mixed else None))

    def _added(self, step: Step) -> int:
        self._steps.append(step)
        return len(self._steps) - 1


def _texts(text: str) -> list[bytes]:
    """Returns a part of a tag with the line break that may be missing in it, and without."""
    before, optional, after = text.partition("\n?")
    return [(before + gap + after).encode() for gap in (("", "\n") if optional else ("",))]
