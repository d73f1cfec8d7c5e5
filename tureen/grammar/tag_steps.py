"""The steps by which a guard follows the text of a structural tag to the JSON values in it.

It goes through the same formats as `structural_tag` once more. Where what comes next is not certain from the text, the
steps cannot be told, and nothing in the tag is guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from tureen.grammar import regex
from tureen.grammar.alphabet import merged
from tureen.grammar.expression import ANYTHING, Both, Chain, Chars, Expression, GrammarError
from tureen.grammar.free_text import any_of
from tureen.grammar.guard.facts import NOWHERE, THE_END, FixedStep, FreeStep, GuardFacts, Step, ValueStep
from tureen.grammar.regex_classes import PythonFlavour
from tureen.grammar.regular import is_empty
from tureen.grammar.rules import SOMETHING
from tureen.grammar.tag_leaves import SCHEMA_STYLES, FormatPlace, GuardedLeaves
from tureen.grammar.tagged_steps import NOTHING_TOLD, Untold, tagged_steps


class Way(NamedTuple):
    """A way to go on: by a text, and then a step."""

    text: str
    then: int
    begins: Expression | None = None  # of a way by all else: what comes then, and whatever is behind it


Ways: TypeAlias = tuple[Way, ...]
LAST: Ways = (Way("", THE_END),)
"""The output ends."""


def tag_steps(tag: Any, leaves: GuardedLeaves, flavour: PythonFlavour) -> GuardFacts | None:
    """Returns the facts that outputs of a structural tag, which is right, are held to; None where they cannot be
    told."""
    finder = _StepFinder(leaves, flavour)
    try:
        ways = finder.legacy(tag) if "structures" in tag else finder.ways(tag["format"], PLACE, LAST)
        start = finder.step(ways)
    except (Untold, GrammarError):
        return None
    return GuardFacts(tuple(leaves.nodes), tuple(finder.steps), start)


PLACE = FormatPlace("structural_tag.format")


class _StepFinder:
    def __init__(self, leaves: GuardedLeaves, flavour: PythonFlavour) -> None:
        self.steps: list[Step] = []
        self._leaves = leaves
        self._flavour = flavour
        self._paths = (*leaves.values, *leaves.tagged, *leaves.budgets)
        self._known: dict[Ways, int] = {}
        self._finders: Mapping[str, Callable[[Any, FormatPlace, Ways], Ways]] = {
            "const_string": lambda value, _, then: self._fixed(value["value"], then),
            "token": lambda value, _, then: self._fixed(value["token"], then),
            **dict.fromkeys(SCHEMA_STYLES, self._schema),
            "json_string": lambda _, __, then: self._value(NOWHERE, then),
            "any_text": lambda _, place, then: self._free(place, then),
            "any_tokens": lambda _, place, then: self._free(place, then),
            "exclude_token": lambda _, place, then: self._free(place, then),
            "regex": self._regex,
            "sequence": self._sequence,
            "or": self._or,
            "optional": lambda value, place, then: (*self.ways(value["content"], place.inner("content"), then), *then),
            "star": lambda value, place, then: (*self._loop(value, place, then), *then),
            "plus": self._loop,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "token_triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
            "token_dispatch": self._dispatch,
        }

    def ways(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        """Returns the ways into a format, behind which others follow. Raises Untold."""
        finder = self._finders.get(value["type"])
        try:
            if finder is None:
                raise Untold
            return finder(value, place, then)
        except Untold:
            if place.stops is not None or self._is_guarded(place.path):
                raise
            return (Way("", THE_END, ANYTHING),)

    def step(self, ways: Ways) -> int:
        """Returns the step from which these ways lead. Raises Untold where the text does not show which."""
        if len(ways) == 1 and not ways[0].text and (ways[0].begins is None or ways[0].then != THE_END):
            return ways[0].then
        if ways not in self._known:
            step = _fixed_step(ways)
            self._known[ways] = self._added(step)
        return self._known[ways]

    def legacy(self, value: Any) -> Ways:
        """Returns the ways into the older form of a structural tag."""
        place = FormatPlace("structural_tag")

        def tags(then: Ways) -> list[tuple[str, Ways]]:
            return [
                (item["begin"], self._value(self._leaves.values.get(f"{place.path}.structures[{at}].schema", NOWHERE),
                                            self._fixed(item["end"], then)))
                for at, item in enumerate(value["structures"])
            ]  # fmt: skip

        return self._triggered(tags, value["triggers"], value, place, LAST)

    def _added(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def _is_guarded(self, path: str) -> bool:
        return any(leaf.startswith(path) for leaf in self._paths)

    def _fixed(self, text: str, then: Ways) -> Ways:
        if not text:
            return then
        if all(way.text for way in then):
            return tuple(way._replace(text=text + way.text) for way in then)
        return (Way(text, self.step(then)),)

    def _value(self, node: int, then: Ways) -> Ways:
        return (Way("", self._added(ValueStep(node, self.step(then)))),)

    def _schema(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        style = value.get("style", SCHEMA_STYLES[value["type"]])
        if style == "json":
            starts = chars_of(self._leaves.starts.get(place.schema, ""))
            [way] = self._value(self._leaves.values.get(place.schema, NOWHERE), then)
            return (way._replace(begins=Chain((starts, ANYTHING))),)
        follow = [(way.text.encode(), way.then) for way in then]
        if any(way.begins is not None or (not way.text and way.then != THE_END) for way in then):
            raise Untold
        values = self._leaves.tagged.get(place.schema, NOTHING_TOLD)
        start = tagged_steps(style, values, self._leaves.nodes, follow, self.steps)
        return (Way("", start),)

    def _free(self, place: FormatPlace, then: Ways) -> Ways:
        most, never = self._leaves.budgets.get(place.path), self._leaves.never.get(place.path, ())
        if place.stops is None:
            if most is not None:
                is_one = place.path in self._leaves.never
                return (Way("", self._added(FreeStep((), most, never)), SOMETHING if is_one else ANYTHING),)
            return (Way("", THE_END, ANYTHING),)
        if not place.stops or {way.text for way in then} != set(place.stops):
            raise Untold
        return (Way("", self._added(FreeStep(tuple((way.text.encode(), way.then) for way in then), most, never))),)

    def _regex(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        if place.stops == ():
            raise Untold
        pattern = regex.parse(value["pattern"], flavour=self._flavour)
        if place.stops is None:
            return (Way("", THE_END, Chain((pattern, ANYTHING))),)
        ends = any_of(place.stops)
        if is_empty(Both(Chain((pattern, ends)), Chain((ANYTHING, ends, SOMETHING)))):
            return self._free(place, then)
        raise Untold

    def _sequence(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        elements = value["elements"]
        last = len(elements) - 1
        ways = then
        for at in range(last, -1, -1):
            inner = place.last(f"elements[{at}]") if at == last else place.inner(f"elements[{at}]")
            try:
                ways = self.ways(elements[at], inner, ways)
            except Untold:
                rest = [f"{place.path}.elements[{index}]" for index in range(at, last + 1)]
                if place.stops is not None or any(map(self._is_guarded, rest)):
                    raise
                ways = self.ways(elements[at], place.last(f"elements[{at}]"), LAST)
        return ways

    def _or(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        return self._all(
            self.ways(item, place.last(f"elements[{at}]"), then) for at, item in enumerate(value["elements"])
        )

    def _all(self, ways: Iterable[Ways]) -> Ways:
        return tuple(dict.fromkeys(way for some in ways for way in some))

    def _loop(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        again = self._added(FixedStep(()))
        ways = self.ways(value["content"], place.inner("content"), (Way("", again),))
        self.steps[again] = _fixed_step((*ways, *then))
        return ways

    def _repeat(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        if value["max"] == 0:
            return then
        ways = self._loop(value, place, then)
        return (*ways, *then) if value["min"] == 0 else ways

    def _tag(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        begin, content = self._parts(value, place, then)
        return self._fixed(begin, content)

    def _parts(self, value: Any, place: FormatPlace, then: Ways) -> tuple[str, Ways]:
        """Returns a tag's begin, and the ways into its content."""
        begin, end = (_texts(value[name]) for name in ("begin", "end"))
        if not any(end):
            return begin[0], self.ways(value["content"], place.last("content"), then)
        inner = FormatPlace(f"{place.path}.content", place.depth + 1, end, end)
        follow = self.step(then)
        return begin[0], self.ways(value["content"], inner, tuple(Way(text, follow) for text in end))

    def _tags(self, value: Any, place: FormatPlace, then: Ways) -> list[tuple[str, Ways]]:
        return [self._parts(tag, place.inner(f"tags[{at}]"), then) for at, tag in enumerate(value["tags"])]

    def _tags_with_separator(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        if value.get("stop_after_first", False):
            first = self._all(self._fixed(begin, ways) for begin, ways in self._tags(value, place, then))
        else:
            after = self._added(FixedStep(()))
            tags = self._tags(value, place, (Way("", after),))
            first = self._all(self._fixed(begin, ways) for begin, ways in tags)
            self.steps[after] = _fixed_step((*self._fixed(value["separator"], first), *then))
        return first if value.get("at_least_one", False) else (*first, *then)

    def _triggered_tags(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        triggers = value["triggers"] if "triggers" in value else value["trigger_tokens"]
        return self._triggered(lambda after: self._tags(value, place, after), triggers, value, place, then)

    def _dispatch(self, value: Any, place: FormatPlace, then: Ways) -> Ways:
        def tags(after: Ways) -> list[tuple[str, Ways]]:
            return [
                (begin, self.ways(content, place.inner(f"rules[{at}][1]"), after))
                for at, (begin, content) in enumerate(value["rules"])
            ]

        options = {"stop_after_first": not value.get("loop", True)}
        return self._triggered(tags, [begin for begin, _ in value["rules"]], options, place, then)

    def _triggered(
        self,
        tags: Callable[[Ways], list[tuple[str, Ways]]],
        triggers: Sequence[str],
        value: Any,
        place: FormatPlace,
        then: Ways,
    ) -> Ways:
        """Free text in which tags begin; `tags` returns the begin of each, and the ways into its content."""
        if place.stops is not None and (not place.stops or {way.text for way in then} != set(place.stops)):
            raise Untold
        free = self._added(FreeStep(()))
        read = tags(then if value.get("stop_after_first", False) else (Way("", free),))
        stops = [(way.text.encode(), way.then) for way in then if way.text]
        for trigger in triggers:
            rests = [(begin[len(trigger) :], ways) for begin, ways in read if begin.startswith(trigger)]
            stops.append((trigger.encode(), self.step(self._all(self._fixed(*rest) for rest in rests))))
        self.steps[free] = FreeStep(tuple(stops))
        if value.get("at_least_one", False):
            return self._all(self._fixed(begin, ways) for begin, ways in read)
        return (Way("", free),)


def chars_of(texts: str) -> Chars:
    """Returns any one of some characters."""
    return Chars(merged((ord(char), ord(char)) for char in texts))


def _texts(value: Any) -> tuple[str, ...]:
    """The texts that a tag begins or ends with."""
    return tuple(value) if isinstance(value, list) else (value["token"] if isinstance(value, dict) else value,)


def _fixed_step(ways: Ways) -> FixedStep:
    """Raises Untold where one of the ways begins as another one."""
    fixed = sorted({(way.text, way.then) for way in ways if way.text})
    if any(longer[0].startswith(shorter[0]) for shorter, longer in pairwise(fixed)):
        raise Untold
    others = [way for way in ways if not way.text]
    goals = {way.then for way in others}
    for way in others:
        if (way.begins is None and way.then != THE_END) or len(goals) > 1:
            raise Untold
        if way.begins is not None and _overlaps(way.begins, [text for text, _ in fixed]):
            raise Untold
    return FixedStep(tuple((text.encode(), then) for text, then in fixed), goals.pop() if goals else None)


def _overlaps(begins: Expression, texts: Sequence[str]) -> bool:
    return bool(texts) and not is_empty(Both(begins, Chain((any_of(texts), ANYTHING))))
