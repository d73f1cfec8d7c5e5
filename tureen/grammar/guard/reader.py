"""Follows the JSON that is being written, byte by byte, and finds what breaks a fact as soon as it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import IntEnum, auto
from fractions import Fraction
from itertools import chain, islice
from typing import Any, NamedTuple

from tureen.grammar.guard.facts import NOWHERE, GuardNode, Variant
from tureen.grammar.guard.multiples import shortest_rest
from tureen.grammar.guard.spellings import has_zero, is_zero_for_good, may_become
from tureen.grammar.number_digits import EXACT_DIGITS, MAX_DIGITS

QUOTE, BACKSLASH, COMMA, OPEN, CLOSE, OPEN_KEYS, CLOSE_KEYS = b'"\\,[]{}'
NUMBER_BYTES = frozenset(b"0123456789+-.eE")
NUMBER_STARTS = frozenset(b"-0123456789")
SPACE = frozenset(b" \n\r\t")
WORDS = (b"true", b"false", b"null")
NO_NODE = GuardNode()

MAX_PLACES = 16
"""The most that a text may be so far; beyond, it is held to some of them. Values within each other multiply them."""


class Mode(IntEnum):
    """The kinds of places in JSON: what may come next."""

    VALUE = auto()
    ITEM_OR_END = auto()
    KEY_OR_END = auto()
    COLON = auto()
    AFTER = auto()  # a comma, or the end of what holds the value
    STRING = auto()
    ESCAPE = auto()
    KEY = auto()
    KEY_ESCAPE = auto()
    NUMBER = auto()
    WORD = auto()
    END = auto()


SCALARS = (Mode.STRING, Mode.ESCAPE, Mode.KEY, Mode.KEY_ESCAPE, Mode.NUMBER, Mode.WORD)
KEYS = (Mode.KEY, Mode.KEY_ESCAPE, Mode.KEY_OR_END)


class Taken(NamedTuple):
    """A value that is taken for one of several things: its text is in the language of a branch."""

    branch: int
    start: int  # where the value begins


class Frame(NamedTuple):
    """An array or object that is open."""

    is_array: bool
    node: int
    start: int  # where its text begins
    parent: Frame | None
    num_done: int = 0  # of its items or members that are complete
    seen: frozenset[Hashable] = frozenset()  # the values of its items, or its keys, where no two may be equal
    texts: tuple[bytes, ...] = ()  # and how they were written
    inner: int = NOWHERE  # the node of the member that is being written
    holds: tuple[Taken, ...] = ()  # of what is open, the outermost first
    counts: bool = False  # it is an item that is counted
    num_counted: int = 0  # of its items


class Place(NamedTuple):
    """A place in the text. It can be kept, and gone back to."""

    mode: Mode
    frame: Frame | None = None
    start: int = 0  # of the scalar or key that is being written
    node: int = 0  # of the value that comes or is being written
    holds: tuple[Taken, ...] = ()  # of the value that is being written, and of what is open around it
    counts: bool = False  # the value is an item that is counted


class PossiblePlaces(NamedTuple):
    """All that the text may be so far, as its values may be several things. Their modes are the same."""

    each: tuple[Place, ...]
    is_narrow: bool = False  # the grammar may allow what is none of these


class Broken(Exception):
    """The text breaks a fact."""


class Elsewhere(Broken):
    """A value is not what it was taken for."""


Fits = Callable[[Taken, bytearray, int], bool]
"""Says whether the text, from where a value begins up to an end, begins one of a branch."""


class JsonReader:
    """Steps from place to place over a text, of which it is given all up to the byte that it reads."""

    def __init__(self, nodes: Sequence[GuardNode], fits: Fits) -> None:
        self._nodes = nodes
        self._fits = fits

    def read(self, places: PossiblePlaces, data: bytearray, at: int) -> PossiblePlaces:
        """Returns the places behind the byte. Raises Broken."""
        after: list[Place] = []
        is_narrow = places.is_narrow
        for place in places.each:
            try:
                after += self._read(place, data, at)
            except Elsewhere:
                continue
            except Broken:
                is_narrow = True
        if not after:
            raise Broken
        if len(after) > 1:
            after = self._different(after)
        if len(after) > MAX_PLACES:
            is_narrow, after = True, self._fewer(after, data, at + 1)
        is_held = any(place.holds for place in after)
        return PossiblePlaces(tuple(after), is_held and (is_narrow or any(map(self._is_counted, places.each))))

    def fitting(self, places: PossiblePlaces, data: bytearray) -> PossiblePlaces | None:
        """Returns the places that the text can be at; None where there are none."""
        each = [place for place in places.each if all(self._fits(hold, data, len(data)) for hold in place.holds)]
        return places._replace(each=tuple(each)) if each else None

    def _fewer(self, places: list[Place], data: bytearray, end: int) -> list[Place]:
        """Returns some of the places that the text up to an end can be at. Raises Broken where there are none."""
        fitting = (place for place in places if all(self._fits(hold, data, end) for hold in place.holds))
        fewer = list(islice(fitting, MAX_PLACES))
        if not fewer:
            raise Broken
        return fewer

    def _different(self, places: list[Place]) -> list[Place]:
        """Returns each place once. Of those that differ in what they count only the one that has counted most, where
        it may have counted any number."""
        most: dict[Place, Place] = {}
        for place in places:
            frame = place.frame
            count = None if frame is None else self._node(frame.node).count
            if frame is None or count is None or count.most is not None or place.mode is not Mode.AFTER:
                most.setdefault(place, place)
                continue
            key = place._replace(frame=frame._replace(num_counted=0))
            known = most.get(key)
            if known is None or known.frame is None or known.frame.num_counted < frame.num_counted:
                most[key] = place
        return list(most.values())

    def _is_counted(self, place: Place) -> bool:
        return place.frame is not None and self._node(place.frame.node).count is not None

    def _read(self, place: Place, data: bytearray, at: int) -> Sequence[Place]:
        byte, mode = data[at], place.mode
        if mode in (Mode.STRING, Mode.KEY):
            return (self._inside(place, data, at),)
        if mode in (Mode.ESCAPE, Mode.KEY_ESCAPE):
            return (place._replace(mode=Mode.STRING if mode is Mode.ESCAPE else Mode.KEY),)
        if mode is Mode.NUMBER:
            if byte in NUMBER_BYTES:
                self._check_beginning(place, data, at + 1)
                return (place,)
            place = self._completed(place, data, at)
        elif mode is Mode.WORD:
            is_whole = bytes(data[place.start : at + 1]) in WORDS
            return (self._completed(place, data, at + 1) if is_whole else place,)
        if byte in SPACE:
            return (place,)
        return self._between(place, data, at)

    def ends(self, places: PossiblePlaces, data: bytearray) -> bool:
        """Returns whether no fact is broken by the text's end."""
        place = places.each[0]
        try:
            if place.mode is Mode.NUMBER and place.frame is None:
                self.end(places, data, len(data))
        except Broken:
            return False
        return True

    def end(self, places: PossiblePlaces, data: bytearray, at: int) -> None:
        """Ends a number that is the whole value. Raises Broken."""
        self._completed(places.each[0], data, at)

    def rest_of_number(self, places: PossiblePlaces, data: bytearray) -> bytes:
        """Returns the fewest characters with which the number that is being written becomes a multiple."""
        for place in places.each:
            node = self._node(place.node)
            if place.mode is Mode.NUMBER and node.step is not None:
                return shortest_rest(bytes(data[place.start :]), node.step, node.bounds)
        return b""

    def is_near(self, place: Place, data: bytearray) -> bool:
        """Returns whether what is being written may still become equal to what was written before it."""
        return any(may_become(text, others) for text, others in self.written(place, data))

    def written(self, place: Place, data: bytearray) -> list[tuple[bytes, tuple[bytes, ...]]]:
        """Returns what there is of each item or key that is being written, and what it must not be equal to."""
        texts = []
        frame = place.frame
        start = place.start if place.mode in SCALARS else len(data)
        has_part = frame is not None and (place.mode in KEYS if not frame.is_array else place.mode is not Mode.AFTER)
        while frame is not None:
            if has_part and frame.texts:
                texts.append((bytes(data[start:]), frame.texts))
            start, frame = frame.start, frame.parent
            has_part = frame is not None and frame.is_array
        return texts

    def _inside(self, place: Place, data: bytearray, at: int) -> Place:
        if data[at] == BACKSLASH:
            return place._replace(mode=Mode.ESCAPE if place.mode is Mode.STRING else Mode.KEY_ESCAPE)
        if data[at] != QUOTE:
            return place
        return self._completed(place, data, at + 1) if place.mode is Mode.STRING else self._key(place, data, at + 1)

    def _between(self, place: Place, data: bytearray, at: int) -> Sequence[Place]:
        """Reads a byte outside of scalars and keys."""
        byte, frame = data[at], place.frame
        if byte in (CLOSE, CLOSE_KEYS) and frame is not None:
            return (self._closed(frame, data, at + 1),)
        if frame is not None and place.mode is Mode.COLON:
            return (Place(Mode.VALUE, frame, at, frame.inner, frame.holds),)
        if place.mode is Mode.AFTER and frame is not None:
            if not frame.is_array:
                return (Place(Mode.KEY_OR_END, frame, at, holds=frame.holds),)
            if not list(self._items(frame)):
                raise Broken
            return (Place(Mode.VALUE, frame, at, self._item(frame), frame.holds),)
        if place.mode is Mode.KEY_OR_END:
            return (place._replace(mode=Mode.KEY, start=at),)
        return [begun for item in self._held(place, at) for begun in self._begun(item, data, at)]

    def _held(self, place: Place, at: int) -> list[Place]:
        """Returns what an item of an array can be."""
        frame = place.frame
        if frame is None or not frame.is_array or self._node(frame.node).count is None:
            return [place]
        return [self._taken(place, variant, at) for variant in self._items(frame)]

    def _taken(self, place: Place, variant: Variant | None, at: int) -> Place:
        if variant is None:
            return place
        holds = place.holds if variant.branch == NOWHERE else (*place.holds, Taken(variant.branch, at))
        return place._replace(node=variant.node, holds=holds, counts=place.counts or variant.counts)

    def _items(self, frame: Frame) -> Iterator[Variant | None]:
        """Yields what the next item can be; None: whatever its node says."""
        count, index = self._node(frame.node).count, frame.num_done
        if count is None or index < count.start:
            yield None
            return
        missing = count.least - frame.num_counted
        for variant in count.variants(index):
            if variant.counts:
                is_right = frame.num_counted < count.least if count.most is None else frame.num_counted < count.most
            else:
                is_right = missing <= count.most_after(index)
            if is_right:
                yield variant

    def _begun(self, place: Place, data: bytearray, at: int) -> Sequence[Place]:
        """Begins a value."""
        byte, node = data[at], self._node(place.node)
        if byte in (OPEN, OPEN_KEYS):
            variants = node.arrays if byte == OPEN else node.objects
            taken = [self._taken(place, variant, at) for variant in variants] if variants else [place]
            return [self._opened(each, byte == OPEN, at) for each in taken]
        mode = Mode.STRING if byte == QUOTE else Mode.NUMBER if byte in NUMBER_STARTS else Mode.WORD
        begun = place._replace(mode=mode, start=at)
        if mode is Mode.NUMBER:
            self._check_beginning(begun, data, at + 1)
        return (begun,)

    def _opened(self, place: Place, is_array: bool, at: int) -> Place:
        opened = Frame(is_array, place.node, at, place.frame, holds=place.holds, counts=place.counts)
        if is_array:
            return Place(Mode.ITEM_OR_END, opened, at, self._item(opened), opened.holds)
        return Place(Mode.KEY_OR_END, opened, at, holds=opened.holds)

    def _item(self, frame: Frame) -> int:
        node = self._node(frame.node)
        return node.first_items[frame.num_done] if frame.num_done < len(node.first_items) else node.items

    def _node(self, index: int) -> GuardNode:
        return NO_NODE if index == NOWHERE else self._nodes[index]

    def _key(self, place: Place, data: bytearray, end: int) -> Place:
        frame = place.frame
        if frame is None:
            return place
        text = bytes(data[place.start : end])
        node = self._node(frame.node)
        if node is not NO_NODE:
            key = json.loads(text)
            if node.least_keys:
                if key in frame.seen:
                    raise Broken
                frame = frame._replace(seen=frame.seen | {key}, texts=(*frame.texts, text))
            frame = frame._replace(inner=node.node_of(key))
        return Place(Mode.COLON, frame, end, holds=frame.holds)

    def _closed(self, frame: Frame, data: bytearray, end: int) -> Place:
        node = self._node(frame.node)
        if not frame.is_array and frame.num_done < node.least_keys:
            raise Broken
        if frame.is_array and node.count is not None and frame.num_counted < node.count.least:
            raise Broken
        value = Place(Mode.AFTER, frame.parent, frame.start, frame.node, frame.holds, frame.counts)
        return self._completed(value, data, end)

    def _completed(self, place: Place, data: bytearray, end: int) -> Place:
        """Returns the place behind a value. Raises Broken."""
        node, frame = self._node(place.node), place.frame
        for hold in place.holds[0 if frame is None else len(frame.holds) :]:
            # Only what follows a number shows that it is complete.
            if not self._fits(hold, data, end + 1 if place.mode is Mode.NUMBER else end):
                raise Elsewhere
        if node.step is not None and place.mode is Mode.NUMBER and not is_multiple(data[place.start : end], node.step):
            raise Broken
        if frame is None:
            return Place(Mode.END)
        if frame.is_array and self._node(frame.node).is_unique:
            text = bytes(data[place.start : end])
            value = comparable(json.loads(text, parse_int=Fraction, parse_float=Fraction))
            if value in frame.seen:
                raise Broken
            frame = frame._replace(seen=frame.seen | {value}, texts=(*frame.texts, text))
        num_counted = frame.num_counted + place.counts
        return Place(
            Mode.AFTER, frame._replace(num_done=frame.num_done + 1, num_counted=num_counted), end, holds=frame.holds
        )

    def _check_beginning(self, place: Place, data: bytearray, end: int) -> None:
        """Raises Broken where a number begins so that it can never be right: it is no multiple, or it is a zero with an
        exponent where there is a zero already, of which no digit makes another."""
        text, node = bytes(data[place.start : end]), self._node(place.node)
        if node.step is not None and not can_be_multiple(text, node.step, node.bounds):
            raise Broken
        if is_zero_for_good(text) and any(map(has_zero, chain(*(others for _, others in self.written(place, data))))):
            raise Broken


def comparable(value: Any) -> Hashable:
    """Returns what is equal for equal JSON values, and only for these. Numbers are Fractions."""
    if isinstance(value, dict):
        return ("object", frozenset((key, comparable(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(comparable, value)))
    return (type(value).__name__, value)


def is_multiple(text: bytes | bytearray, step: tuple[int, int]) -> bool:
    """Returns whether a whole number is a multiple of step[0] / 10 ** step[1]."""
    try:
        number = Fraction(bytes(text).decode())
    except ValueError:
        return False
    return bool((number * 10 ** step[1]) % step[0] == 0)


def can_be_multiple(text: bytes, step: tuple[int, int], bounds: tuple[str | None, str | None]) -> bool:
    """Returns whether a number that begins so can become a multiple, without an exponent or more decimals than one has.

    Decimals and exponents that would be right by chance are given up: so a number can always be ended.
    """
    factor, scale = step
    sign, digits = (-1, text[1:]) if text.startswith(b"-") else (1, text)
    whole, point, decimals = digits.partition(b".")
    if len(decimals) > scale or (point and not scale) or not (whole + decimals).replace(b"-", b"x").isdigit():
        return not digits
    value = int(whole + decimals)
    if point:
        reaches = [(value * 10 ** (scale - len(decimals)), 10 ** (scale - len(decimals)))]
    elif not value:
        reaches = [(0, 10**scale)]
    else:
        sizes = range(scale, scale + max(1, _most_digits(scale, bounds) - len(whole) + 1))
        reaches = [(value * 10**size, 10**size) for size in sizes]
    if sign < 0 and not value:
        reaches = [(1, size - 1) for _, size in reaches]  # there is no -0
    low, high = (None if bound is None else Fraction(bound) * 10**scale * sign for bound in bounds)
    if sign < 0:
        low, high = high, low
    return any(_has_multiple(first, first + size - 1, factor, low, high) for first, size in reaches)


def _most_digits(scale: int, bounds: tuple[str | None, str | None]) -> int:
    """Returns how many digits a number surely may have before the point: the grammar does not know longer ones."""
    sizes = [len(str(abs(int(Fraction(bound))))) for bound in bounds if bound is not None]
    return max([EXACT_DIGITS - scale if scale else MAX_DIGITS, *sizes])


def _has_multiple(first: int, last: int, factor: int, low: Fraction | None, high: Fraction | None) -> bool:
    """Returns whether a multiple lies from the first to the last number, and within the bounds."""
    least = first if low is None else max(Fraction(first), low)
    most = last if high is None else min(Fraction(last), high)
    return not least > int(most // factor) * factor
