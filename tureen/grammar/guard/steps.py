"""Follows an output to the JSON values in it that are guarded, and these by a reader of JSON."""

from __future__ import annotations

from typing import NamedTuple

from tureen.grammar.guard.facts import THE_END, FixedStep, FreeStep, GuardFacts, KeyStep, Step, ValueStep
from tureen.grammar.guard.reader import NUMBER_BYTES, SPACE, Fits, JsonReader, Mode, Place, PossiblePlaces

OPENING = frozenset(b"[{")


class StepPlace(NamedTuple):
    """A place in the output. It can be kept, and gone back to."""

    step: int
    start: int  # where the text of the step begins
    value: PossiblePlaces | None = None  # in its JSON value


class StepReader:
    """Goes from place to place over a text, of which it is given all up to the byte that it reads."""

    def __init__(self, facts: GuardFacts, fits: Fits) -> None:
        self.json = JsonReader(facts.nodes, fits)
        self._steps = facts.steps
        self.start = self._entered(facts.start, 0)

    def step(self, place: StepPlace) -> Step | None:
        """Returns the step that a place is in; None behind the last."""
        return None if place.step == THE_END else self._steps[place.step]

    def read(self, place: StepPlace, data: bytearray, at: int) -> StepPlace:
        """Returns the place behind the byte. Raises Broken."""
        step = self.step(place)
        match step:
            case None:
                return place
            case ValueStep():
                return self._value(step, place, data, at)
            case FixedStep():
                return self._fixed(step, place, data, at)
            case FreeStep(stops):
                complete = [then for stop, then in stops if data.endswith(stop, place.start, at + 1)]
                return self._entered(complete[0], at + 1) if complete else place
            case KeyStep():
                return self._key(step, place, data, at)

    def ends(self, place: StepPlace, data: bytearray) -> bool:
        """Returns whether no fact is broken by the text's end."""
        return place.value is None or self.json.ends(place.value, data)

    def _entered(self, step: int, at: int) -> StepPlace:
        entered = None if step == THE_END else self._steps[step]
        value = None
        if isinstance(entered, ValueStep):
            value = PossiblePlaces((Place(Mode.VALUE, None, at, entered.node),))
        return StepPlace(step, at, value)

    def _fixed(self, step: FixedStep, place: StepPlace, data: bytearray, at: int) -> StepPlace:
        text = bytes(data[place.start : at + 1])
        for fixed, then in step.texts:
            if fixed == text:
                return self._entered(then, at + 1)
        if step.otherwise is None or any(fixed.startswith(text) for fixed, _ in step.texts):
            return place
        return self._again(self._entered(step.otherwise, place.start), data, at)

    def _value(self, step: ValueStep, place: StepPlace, data: bytearray, at: int) -> StepPlace:
        assert place.value is not None
        value, byte = place.value, data[at]
        inside = value.each[0]
        begins = inside.mode is Mode.VALUE and inside.frame is None and byte not in SPACE
        if begins and step.free is not None and byte not in OPENING:
            return self._again(self._entered(step.free, place.start), data, at)
        if inside.mode is Mode.NUMBER and inside.frame is None and byte not in NUMBER_BYTES:
            self.json.end(value, data, at)
            return self.read(self._entered(step.then, at), data, at)
        value = self.json.read(value, data, at)
        has_ended = value.each[0].mode is Mode.END
        return self._entered(step.then, at + 1) if has_ended else place._replace(value=value)

    def _key(self, step: KeyStep, place: StepPlace, data: bytearray, at: int) -> StepPlace:
        for number, stop in enumerate(step.stops):
            if data.endswith(stop, place.start, at + 1):
                key = data[place.start : at + 1 - len(stop)].decode("utf-8", "replace")
                return self._entered(step.keys.get(key, step.others)[number], at + 1)
        return place

    def _again(self, place: StepPlace, data: bytearray, at: int) -> StepPlace:
        """Reads what there is of a step's text once more, as that of another step."""
        for index in range(place.start, at + 1):
            place = self.read(place, data, index)
        return place
