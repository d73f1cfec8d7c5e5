"""Structural tags, both of their JSON forms, to a language: free text in which tags hold constrained content."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tureen.errors import echo
from tureen.grammar.base import Vocabulary
from tureen.grammar.expression import EMPTY, Choice, Expression, GrammarError, Language, Repeat, Unenforced
from tureen.grammar.fragments import Assembly, TerminalPiece, apart, fixed
from tureen.grammar.free_text import endless, free_of, up_to
from tureen.grammar.guard.finding import Follows, follows_all
from tureen.grammar.json_text import decoded, flag, integer, keys, listed, string, strings
from tureen.grammar.regex_classes import PythonFlavour
from tureen.grammar.rules import calls, chain, choice, reachable, repeat
from tureen.grammar.tag_leaves import FormatPlace, GuardedLeaves, LeafFormats
from tureen.grammar.tag_steps import tag_steps
from tureen.grammar.token_texts import with_token_texts

MAX_NESTING = 32
MAX_TIMES = 2_000
MAX_FORMATS = 2_000
MAX_TRIGGERS = 200


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag whose content and end are pieces already."""

    begin: str
    rest: TerminalPiece  # content and end
    path: str

    def after(self, length: int) -> TerminalPiece:
        """Returns the tag without the first characters of its begin."""
        return fixed(self.begin[length:], self.rest)


def structural_tag(
    text: str,
    *,
    strict: bool = False,
    vocabulary: Vocabulary | None = None,
    flavour: PythonFlavour = "python-ascii",
    follows: Follows = follows_all,
) -> Language:
    """Raises GrammarError, which names the place: `structural_tag.format.tags[0].begin`. `strict`,
    `follows`: see `json_schema`. `vocabulary`: the one that numbers of tokens are about."""
    value = decoded(text, "structural_tag")
    if vocabulary is not None:
        value = with_token_texts(value, vocabulary)
    builder = _Builder(strict, flavour, follows=follows)
    start = (builder.legacy if isinstance(value, dict) and "structures" in value else builder.whole)(value)
    unenforced, guarded = builder.unenforced, builder.guarded
    budgets = builder.guards.budgets
    facts = tag_steps(value, builder.guards, flavour) if guarded or budgets else None
    if facts is None:
        if budgets:
            path = next(iter(budgets))
            name, instead = ("exclude_token", "regex") if path in builder.guards.never else ("max_tokens", "max_chars")
            raise GrammarError(
                f"{path}.{name} cannot be counted here: it is not certain from the text where this free text begins or"
                f" ends; use {instead}"
            )
        if builder.promised:
            raise GrammarError(f"{builder.promised[0].schema.partition('#')[0]}: {builder.promised[0].why}")
        unenforced, guarded = (*unenforced, *guarded), ()
    has_specials = flag(value.get("special_tokens", False), "structural_tag.special_tokens")
    asked = () if facts is None else tuple(builder.guards.branches)
    rules = reachable(Choice((start.expression, *asked)), builder.assembly.rules)
    return Language(start.expression, rules, unenforced, facts, guarded, asked, has_specials)


class _Builder:
    def __init__(self, strict: bool, flavour: PythonFlavour, *, follows: Follows) -> None:
        self.assembly = Assembly()
        leaves = self._leaves = LeafFormats(self.assembly, strict=strict, flavour=flavour, follows=follows)
        self._formats = 0
        self._makers: dict[str, Callable[[dict[str, Any], FormatPlace], TerminalPiece]] = {
            "const_string": leaves.const_string,
            "json_schema": leaves.json_schema,
            "json_string": leaves.json_string,
            "grammar": leaves.grammar,
            "regex": leaves.regex,
            "any_text": leaves.any_text,
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
            "token": self._token,
            "exclude_token": self._exclude_token,
            "any_tokens": self._any_tokens,
            "token_triggered_tags": self._token_triggered_tags,
            "token_dispatch": self._token_dispatch,
            "qwen_xml_parameter": leaves.qwen_xml_parameter,
        }

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        """The keywords of the schemas that the language does not keep."""
        return tuple(self._leaves.unenforced)

    @property
    def guarded(self) -> tuple[Unenforced, ...]:
        """The keywords that a guard can keep if it finds the values."""
        return tuple(self._leaves.guarded)

    @property
    def promised(self) -> tuple[Unenforced, ...]:
        """The keywords of strict schemas among these."""
        return tuple(self._leaves.promised)

    @property
    def guards(self) -> GuardedLeaves:
        return self._leaves.guards

    def whole(self, value: Any) -> TerminalPiece:
        keys(value, "structural_tag", ("type", "format"), ("special_tokens",))
        _check_type(value)
        return self._format(value["format"], FormatPlace("structural_tag.format"))

    def legacy(self, value: Any) -> TerminalPiece:
        keys(value, "structural_tag", ("structures", "triggers"), ("type", "special_tokens"))
        _check_type(value)
        place = FormatPlace("structural_tag")
        tags: list[Tag] = []
        for at, item in enumerate(listed(value["structures"], "structural_tag.structures")):
            path = f"structural_tag.structures[{at}]"
            keys(item, path, ("begin", "schema", "end"))
            ends = (string(item["end"], f"{path}.end"),)
            schema = item["schema"] if isinstance(item["schema"], str) else json.dumps(item["schema"])
            content = self._leaves.schema(schema, f"{path}.schema")
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
        name = value.get("type")
        if isinstance(name, str) and name in self._makers:
            return self._makers[name](value, place)
        raise GrammarError(f"{place.path}.type must be one of {', '.join(self._makers)}, got {echo(name)}")

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
        return self._leaves.ended(TerminalPiece(repeat(content.expression, least, most)), place)

    def _tag(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        return self._read_tag(value, place).after(0)

    def _read_tag(self, value: Any, place: FormatPlace) -> Tag:
        keys(value, place.path, ("begin", "content", "end"), ("type",))
        if value.get("type", "tag") != "tag":
            raise GrammarError(f"{place.path}.type must be 'tag', got {echo(value['type'])}")
        begin = _text_or_token(value["begin"], f"{place.path}.begin")
        if isinstance(value["end"], list):
            ends = strings(value["end"], f"{place.path}.end")
        else:
            end = _text_or_token(value["end"], f"{place.path}.end")
            ends = (end,) if end else ()
        if not ends:
            return Tag(begin, self._format(value["content"], place.last("content")), place.path)
        content = self._format(value["content"], FormatPlace(f"{place.path}.content", place.depth + 1, ends, ends))
        return Tag(begin, self._leaves.ended(content, place), place.path)

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
        return self._leaves.ended(whole, place)

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

    def _token(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "token"))
        return self._leaves.ended(fixed(_token_text(value["token"], f"{place.path}.token")), place)

    def _exclude_token(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type",), ("exclude_tokens",))
        excludes = _token_texts(value.get("exclude_tokens", []), f"{place.path}.exclude_tokens")
        return self._leaves.one_token(excludes, place)

    def _any_tokens(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type",), ("exclude_tokens", "max_tokens"))
        excludes = _token_texts(value.get("exclude_tokens", []), f"{place.path}.exclude_tokens")
        return self._leaves.any_text(
            {"type": "any_text", "excludes": excludes, "max_tokens": value.get("max_tokens")}, place
        )

    def _token_triggered_tags(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        optional = ("at_least_one", "stop_after_first", "exclude_tokens")
        keys(value, place.path, ("type", "trigger_tokens", "tags"), optional)
        triggers = _token_texts(value["trigger_tokens"], f"{place.path}.trigger_tokens")
        excludes = _token_texts(value.get("exclude_tokens", []), f"{place.path}.exclude_tokens")
        return triggered(self.assembly, self._read_tags(value, place), triggers, excludes, value, place)

    def _token_dispatch(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "rules"), ("loop", "exclude_tokens"))
        rules = [
            [_token_text(item[0], f"{place.path}.rules[{at}][0]"), *item[1:]]
            if isinstance(item, list) and item
            else item
            for at, item in enumerate(listed(value["rules"], f"{place.path}.rules"))
        ]
        excludes = _token_texts(value.get("exclude_tokens", []), f"{place.path}.exclude_tokens")
        return self._dispatch(
            {"type": "dispatch", "rules": rules, "loop": value.get("loop", True), "excludes": excludes}, place
        )


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
    return endless(free_of((*triggers, *excludes, *place.ends)), is_last=place.stops is None)


def _check_triggers(tags: Sequence[Tag], triggers: Sequence[str], excludes: Sequence[str], place: FormatPlace) -> None:
    if len(triggers) > MAX_TRIGGERS:
        raise GrammarError(f"{place.path}.triggers has too many: {len(triggers)}; at most {MAX_TRIGGERS}")
    for at, trigger in enumerate(triggers):
        _check_trigger(f"{place.path}.triggers[{at}] {echo(trigger)}", trigger, triggers, excludes, place)
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise GrammarError(
                f"{place.path}.triggers[{at}] {echo(trigger)} is not the beginning of a tag; remove it, or add a tag "
                f"whose begin starts with it"
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


def _bounds(value: dict[str, Any], path: str) -> tuple[bool, bool]:
    at_least_one = flag(value.get("at_least_one", False), f"{path}.at_least_one")
    return at_least_one, flag(value.get("stop_after_first", False), f"{path}.stop_after_first")


def _text_or_token(value: Any, path: str) -> str:
    if isinstance(value, dict):
        keys(value, path, ("token",), ("type",))
        return _token_text(value["token"], f"{path}.token")
    return string(value, path)


def _token_text(value: Any, path: str) -> str:
    """The text of a token: no output holds special tokens, and what is written as their text reads the same."""
    if isinstance(value, int):
        raise GrammarError(f"{path} {echo(value)} is a number; write the token's text")
    if not string(value, path):
        raise GrammarError(f"{path} is empty; write the token's text")
    return string(value, path)


def _token_texts(value: Any, path: str) -> list[str]:
    items = listed(value, path) if value != [] else []
    return list(strings([_token_text(item, f"{path}[{at}]") for at, item in enumerate(items)], path, may_be_none=True))


def _check_type(value: dict[str, Any]) -> None:
    if value.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"structural_tag.type must be 'structural_tag', got {echo(value['type'])}")
