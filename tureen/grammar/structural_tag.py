"""Structural tags, both of their JSON forms, to a language: free text in which tags hold constrained content."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tureen.errors import echo
from tureen.grammar import regex
from tureen.grammar.expression import EMPTY, Expression, GrammarError, Language, Repeat, RuleCall, Terminal
from tureen.grammar.free_text import any_of, free_of, to_the_end, up_to
from tureen.grammar.json_text import decoded, flag, integer, keys, listed, string, strings
from tureen.grammar.notations import grammar
from tureen.grammar.pieces import Assembly, TerminalPiece, apart, fixed
from tureen.grammar.regular import continuations, is_empty
from tureen.grammar.rules import calls, can_be_empty, chain, choice, reachable, repeat, replaced
from tureen.grammar.schema.language import json_schema, tagged_schema
from tureen.grammar.schema.tagged import STYLES, without
from tureen.grammar.tag_tokens import TOKEN_FORMATS, as_text, text_or_token

T = TypeVar("T")

MAX_NESTING = 32
MAX_CHARS = 2_000
MAX_TIMES = 2_000
MAX_FORMATS = 2_000
MAX_TRIGGERS = 200
MAX_STATES = 500  # of an automaton that is only made to find a terminal

JSON_STARTS = tuple('{["-0123456789tfn')
NUMBER_GOES_ON = "0123456789.eE+-"


@dataclass(frozen=True, slots=True)
class FormatPlace:
    """The place of a format in its tag."""

    path: str
    depth: int = 0
    ends: tuple[str, ...] = ()  # of the tag around it: free text never holds them
    stops: tuple[str, ...] | None = None
    """One of these follows and belongs to what the format becomes; none: something else; None: the output ends."""

    def inner(self, path: str) -> FormatPlace:
        """Returns the place of a part that more follows."""
        return FormatPlace(f"{self.path}.{path}", self.depth + 1, self.ends, ())

    def last(self, path: str) -> FormatPlace:
        """Returns the place of a part that stands at the end of it."""
        return replace(self, path=f"{self.path}.{path}", depth=self.depth + 1)


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag whose content and end are pieces already."""

    begin: str
    rest: TerminalPiece  # content and end
    path: str

    def after(self, length: int) -> TerminalPiece:
        """Returns the tag without the first characters of its begin."""
        return fixed(self.begin[length:], self.rest)


def structural_tag(text: str) -> Language:
    """Raises GrammarError, which names the place: `structural_tag.format.tags[0].begin`."""
    value = decoded(text, "structural_tag")
    builder = _Builder()
    start = (builder.legacy if isinstance(value, dict) and "structures" in value else builder.whole)(value)
    return Language(start.expression, reachable(start.expression, builder.assembly.rules))


class _Builder:
    def __init__(self) -> None:
        self.assembly = Assembly()
        self._languages = 0
        self._formats = 0
        self._makers: dict[str, Callable[[dict[str, Any], FormatPlace], TerminalPiece]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "grammar": self._grammar,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "plus": self._plus,
            "star": self._star,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
            "qwen_xml_parameter": self._qwen_xml_parameter,
        }

    def whole(self, value: Any) -> TerminalPiece:
        keys(value, "structural_tag", ("type", "format"))
        _check_type(value)
        return self._format(value["format"], FormatPlace("structural_tag.format"))

    def legacy(self, value: Any) -> TerminalPiece:
        keys(value, "structural_tag", ("structures", "triggers"), ("type",))
        _check_type(value)
        place = FormatPlace("structural_tag")
        tags: list[Tag] = []
        for at, item in enumerate(listed(value["structures"], "structural_tag.structures")):
            path = f"structural_tag.structures[{at}]"
            keys(item, path, ("begin", "schema", "end"))
            ends = (string(item["end"], f"{path}.end"),)
            schema = item["schema"] if isinstance(item["schema"], str) else json.dumps(item["schema"])
            content = self._schema(schema, f"{path}.schema")
            tags.append(Tag(string(item["begin"], f"{path}.begin"), self.assembly.ended(content, ends), path))
        triggers = strings(value["triggers"], "structural_tag.triggers")
        return triggered(self.assembly, tags, triggers, (), {}, place)

    def _format(self, value: Any, place: FormatPlace) -> TerminalPiece:
        if not isinstance(value, dict):
            raise GrammarError(f"{place.path} must be an object with a type, got {echo(value)}")
        if place.depth > MAX_NESTING:
            raise GrammarError(f"{place.path[:200]}… is nested too deep: at most {MAX_NESTING} formats in each other")
        self._formats += 1
        if self._formats > MAX_FORMATS:
            raise GrammarError(f"{place.path} is too much: at most {MAX_FORMATS} formats in one structural tag")
        value = as_text(value, place.path)
        name = value.get("type")
        if isinstance(name, str) and name in self._makers:
            return self._makers[name](value, place)
        raise GrammarError(
            f"{place.path}.type must be one of {', '.join((*self._makers, *TOKEN_FORMATS))}, got {echo(name)}"
        )

    def _const_string(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "value"))
        return self._ended(fixed(string(value["value"], f"{place.path}.value")), place)

    def _json_schema(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "json_schema"), ("style", "any_order", "max_whitespace_cnt", "excludes"))
        flag(value.get("any_order", False), f"{place.path}.any_order")  # the order of the schema is one of them
        most = value.get("max_whitespace_cnt")
        if most is not None and integer(most, f"{place.path}.max_whitespace_cnt") < 1:
            raise GrammarError(f"{place.path}.max_whitespace_cnt must be at least 1: one space follows , and :")
        schema = value["json_schema"]
        if not isinstance(schema, (dict, bool)):
            raise GrammarError(f"{place.path}.json_schema must be a schema, got {echo(schema)}")
        excludes = strings(value.get("excludes", []), f"{place.path}.excludes", may_be_none=True)
        style = value.get("style", "json")
        path = f"{place.path}.json_schema"
        if style == "json":
            return self._ended(self._schema(json.dumps(schema), path, excludes), place)
        if style not in STYLES:
            raise GrammarError(f"{place.path}.style must be json or one of {', '.join(STYLES)}, got {echo(style)}")
        language = _at(path, lambda: tagged_schema(json.dumps(schema), style, self._prefix(), excludes))
        self.assembly.rules.update(language.rules)
        return self._ended(TerminalPiece(language.start), place)

    def _qwen_xml_parameter(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "json_schema"))
        return self._json_schema({**value, "style": "qwen_xml"}, place)

    def _schema(self, schema: str, path: str, excludes: Sequence[str] = ()) -> TerminalPiece:
        language = _at(path, lambda: json_schema(schema, self._prefix()))
        self.assembly.rules.update({name: without(rule, excludes) for name, rule in language.rules.items()})
        return TerminalPiece(without(language.start, excludes), JSON_STARTS, NUMBER_GOES_ON)

    def _grammar(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "grammar"))
        text = string(value["grammar"], f"{place.path}.grammar")
        language = _at(f"{place.path}.grammar", lambda: grammar(text))
        prefix = self._prefix()

        def renamed(name: str) -> RuleCall:
            return RuleCall(prefix + name)

        self.assembly.rules.update({prefix + name: replaced(rule, renamed) for name, rule in language.rules.items()})
        return self._set(replaced(language.start, renamed), place)

    def _regex(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "pattern"))
        path = f"{place.path}.pattern"
        pattern = string(value["pattern"], path)
        expression = _at(path, lambda: regex.parse(pattern, flavour="python"))
        if _at(path, lambda: is_empty(expression)):
            raise GrammarError(f"{path} matches nothing: {echo(pattern)}; change it")
        return self._set(expression, place)

    def _set(self, expression: Expression, place: FormatPlace) -> TerminalPiece:
        """Makes an expression without terminals of its own one terminal, if it shows where its text ends."""
        if any(calls(expression)):
            return self._ended(TerminalPiece(expression), place)
        if place.stops is None:
            return TerminalPiece(to_the_end(expression))
        whole = chain((expression, any_of(place.stops))) if place.stops else expression
        if can_be_empty(whole) or _can_go_on(whole):
            return TerminalPiece(whole)
        return TerminalPiece(Terminal(whole), None, "")

    def _any_text(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type",), ("excludes", "max_chars", "max_tokens"))
        if value.get("max_tokens") is not None:
            raise GrammarError(f"{place.path}.max_tokens is not supported; use max_chars")
        excludes = strings(value.get("excludes", []), f"{place.path}.excludes", may_be_none=True)
        most = value.get("max_chars")
        if most is not None:
            most = integer(most, f"{place.path}.max_chars", MAX_CHARS)
        if place.stops:
            return TerminalPiece(up_to(place.stops, place.stops, free_of(excludes, most)), None, "")
        free = free_of((*excludes, *place.ends), most)
        return TerminalPiece(to_the_end(free)) if place.stops is None else TerminalPiece(free)

    def _sequence(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "elements"))
        elements = listed(value["elements"], f"{place.path}.elements")
        pieces = [self._format(item, place.inner(f"elements[{at}]")) for at, item in enumerate(elements[:-1])]
        pieces.append(self._format(elements[-1], place.last(f"elements[{len(elements) - 1}]")))
        return self.assembly.joined(pieces)

    def _or(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "elements"))
        elements = listed(value["elements"], f"{place.path}.elements")
        return self.assembly.either(
            [self._format(item, place.last(f"elements[{at}]")) for at, item in enumerate(elements)]
        )

    def _optional(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "content"))
        return self._times(value, place, 0, 1)

    def _plus(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "content"))
        return self._times(value, place, 1, None)

    def _star(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "content"))
        return self._times(value, place, 0, None)

    def _repeat(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "content", "min", "max"))
        least = integer(value["min"], f"{place.path}.min", MAX_TIMES)
        most = None if value["max"] == -1 else integer(value["max"], f"{place.path}.max", MAX_TIMES)
        if most is not None and most < least:
            raise GrammarError(f"{place.path}.max must be at least min ({least}) or -1, got {most}")
        return self._times(value, place, least, most)

    def _times(self, value: dict[str, Any], place: FormatPlace, least: int, most: int | None) -> TerminalPiece:
        content = self.assembly.without_terminals(self._format(value["content"], place.inner("content")))
        if any(calls(content.expression)) and self.assembly.can_be_empty(content):
            raise GrammarError(f"{place.path}.content can be empty, which cannot be repeated; make it match something")
        return self._ended(TerminalPiece(repeat(content.expression, least, most)), place)

    def _tag(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        return self._read_tag(value, place).after(0)

    def _read_tag(self, value: Any, place: FormatPlace) -> Tag:
        keys(value, place.path, ("begin", "content", "end"), ("type",))
        if value.get("type", "tag") != "tag":
            raise GrammarError(f"{place.path}.type must be 'tag', got {echo(value['type'])}")
        begin = text_or_token(value["begin"], f"{place.path}.begin")
        if isinstance(value["end"], list):
            ends = strings(value["end"], f"{place.path}.end")
        else:
            end = text_or_token(value["end"], f"{place.path}.end")
            ends = (end,) if end else ()
        if not ends:
            return Tag(begin, self._format(value["content"], place.last("content")), place.path)
        content = self._format(value["content"], FormatPlace(f"{place.path}.content", place.depth + 1, ends, ends))
        return Tag(begin, self._ended(content, place), place.path)

    def _triggered_tags(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "triggers", "tags"), ("at_least_one", "stop_after_first", "excludes"))
        triggers = strings(value["triggers"], f"{place.path}.triggers")
        excludes = strings(value.get("excludes", []), f"{place.path}.excludes", may_be_none=True)
        tags = self._read_tags(value, place)
        return triggered(self.assembly, tags, triggers, excludes, value, place)

    def _read_tags(self, value: dict[str, Any], place: FormatPlace) -> list[Tag]:
        tags = listed(value["tags"], f"{place.path}.tags")
        return [self._read_tag(item, place.inner(f"tags[{at}]")) for at, item in enumerate(tags)]

    def _tags_with_separator(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "tags", "separator"), ("at_least_one", "stop_after_first"))
        separator = string(value["separator"], f"{place.path}.separator")
        at_least_one, stop_after_first = _bounds(value, place.path)
        first = self.assembly.either([tag.after(0) for tag in self._read_tags(value, place)])
        more = fixed(separator, first)
        list_ = repeat(more.expression, 0, 0 if stop_after_first else None)
        whole = TerminalPiece(chain((first.expression, list_)), first.starts, "")
        if not at_least_one:
            whole = TerminalPiece(choice((EMPTY, whole.expression)), None, "")
        what_follows = (*(first.starts or ("",)), *(more.starts or ("",)), *(place.stops or ()))
        if place.stops == () or first.goes_on != "" or not apart(sorted(set(what_follows))):
            whole = self.assembly.without_terminals(whole)
        return self._ended(whole, place)

    def _dispatch(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "rules"), ("loop", "excludes"))
        tags = []
        for at, item in enumerate(listed(value["rules"], f"{place.path}.rules")):
            path = f"rules[{at}]"
            if not isinstance(item, list) or len(item) != 2:
                raise GrammarError(f"{place.path}.{path} must be a pair of a pattern and a format, got {echo(item)}")
            pattern = string(item[0], f"{place.path}.{path}[0]")
            tags.append(Tag(pattern, self._format(item[1], place.inner(f"{path}[1]")), f"{place.path}.{path}"))
        patterns = strings([tag.begin for tag in tags], f"{place.path}.rules")
        excludes = strings(value.get("excludes", []), f"{place.path}.excludes", may_be_none=True)
        loop = flag(value.get("loop", True), f"{place.path}.loop")
        return triggered(self.assembly, tags, patterns, excludes, {"stop_after_first": not loop}, place)

    def _ended(self, piece: TerminalPiece, place: FormatPlace) -> TerminalPiece:
        return self.assembly.ended(piece, place.stops or ())

    def _prefix(self) -> str:
        self._languages += 1
        return f"t{self._languages}-"


def triggered(
    assembly: Assembly,
    tags: Sequence[Tag],
    triggers: Sequence[str],
    excludes: Sequence[str],
    value: dict[str, Any],
    place: FormatPlace,
) -> TerminalPiece:
    """Returns free text; where one of the triggers is complete, a tag that begins with it must go on.

    With `at_least_one` the text begins with a tag.
    """
    at_least_one, stop_after_first = _bounds(value, place.path)
    _check_triggers(tags, triggers, excludes, place)
    stops = (*triggers, *place.ends)
    dispatched: list[TerminalPiece] = []
    for trigger in triggers:
        bodies = [tag.after(len(trigger)) for tag in tags if tag.begin.startswith(trigger)]
        head = TerminalPiece(up_to((trigger,), stops, never=excludes), None, "")
        dispatched.append(assembly.joined((head, assembly.either(bodies))))
    tagged = TerminalPiece(choice(piece.expression for piece in dispatched), None, "")
    text = TerminalPiece(_free_end(triggers, excludes, place), None, "" if place.stops else None)
    if stop_after_first:
        tagged = assembly.ended(tagged, place.stops or ())
        whole = TerminalPiece(choice((text.expression, tagged.expression)), None, text.goes_on)
    else:
        whole = TerminalPiece(chain((Repeat(tagged.expression), text.expression)), None, text.goes_on)
    if place.stops == () or any(piece.goes_on != "" for piece in dispatched):
        whole = assembly.without_terminals(whole)
    if not at_least_one:
        return whole
    first = assembly.either([tag.after(0) for tag in tags])
    return assembly.ended(first, place.stops or ()) if stop_after_first else assembly.joined((first, whole))


def _free_end(triggers: Sequence[str], excludes: Sequence[str], place: FormatPlace) -> Expression:
    """The free text after the last tag, with what ends it."""
    if place.stops:
        return up_to(place.stops, (*triggers, *place.ends), free_of(excludes))
    free = free_of((*triggers, *excludes, *place.ends))
    return to_the_end(free) if place.stops is None else free


def _check_triggers(tags: Sequence[Tag], triggers: Sequence[str], excludes: Sequence[str], place: FormatPlace) -> None:
    if len(triggers) > MAX_TRIGGERS:
        raise GrammarError(f"{place.path}.triggers has too many: {len(triggers)}; at most {MAX_TRIGGERS}")
    for at, trigger in enumerate(triggers):
        _check_trigger(f"{place.path}.triggers[{at}] {echo(trigger)}", trigger, triggers, excludes, place)
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise GrammarError(
                f"{place.path}.triggers[{at}] {echo(trigger)} begins no tag; remove it, or add a tag whose begin "
                f"starts with it"
            )
    for tag in tags:
        if not tag.begin.startswith(tuple(triggers)):
            raise GrammarError(
                f"{tag.path}.begin {echo(tag.begin)} starts with none of {place.path}.triggers; add the start of it"
            )


def _check_trigger(
    name: str, trigger: str, triggers: Sequence[str], excludes: Sequence[str], place: FormatPlace
) -> None:
    for other in triggers:
        if other != trigger and other in trigger:
            raise GrammarError(f"{name} holds the trigger {echo(other)}, which always comes first; remove one")
    for end in place.ends:
        if end in trigger or trigger in end:
            raise GrammarError(
                f"{name} and the end {echo(end)} of the tag around it hold each other: it is not certain which one "
                f"comes; change one"
            )
    for excluded in excludes:
        if excluded in trigger:
            raise GrammarError(f"{name} holds {echo(excluded)}, which is excluded; remove one")


def _can_go_on(expression: Expression) -> bool:
    """Some of its texts begin others, or it takes long to tell."""
    try:
        return bool(continuations(expression, MAX_STATES).ranges)
    except GrammarError:
        return True


def _bounds(value: dict[str, Any], path: str) -> tuple[bool, bool]:
    at_least_one = flag(value.get("at_least_one", False), f"{path}.at_least_one")
    return at_least_one, flag(value.get("stop_after_first", False), f"{path}.stop_after_first")


def _check_type(value: dict[str, Any]) -> None:
    if value.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"structural_tag.type must be 'structural_tag', got {echo(value['type'])}")


def _at(path: str, read: Callable[[], T]) -> T:
    """Names the place in an error."""
    try:
        return read()
    except GrammarError as error:
        raise GrammarError(f"{path}: {error}") from None
