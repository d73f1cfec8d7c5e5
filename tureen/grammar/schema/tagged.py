"""Objects whose properties stand in tags, as models write the arguments of their calls: `<parameter=city>Oslo</…>`.

A string stands as it is, without quotes; what is no string as JSON, or in tags of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tureen.errors import echo
from tureen.grammar.expression import (
    ANYTHING,
    NOTHING,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    GrammarError,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.free_text import free_of
from tureen.grammar.regular import is_empty
from tureen.grammar.rules import chain, choice, repeat, unmarked
from tureen.grammar.schema.shapes import ObjectShape, PropertySet, ValueSet, ValueShape
from tureen.grammar.schema.strings import StringSet
from tureen.grammar.schema.writer import SchemaWriter

BREAK = Text("\n")
GAP = Repeat(BREAK, 0, 1)
LETTER, LETTER_OR_DIGIT = Chars(((65, 90), (95, 95), (97, 122))), Chars(((48, 57), (65, 90), (95, 95), (97, 122)))
NAME = Chain((LETTER, Repeat(LETTER_OR_DIGIT, 0, 63)))
MAX_KEY = 200
IN_NUMBERS = Chars(((43, 43), (45, 46), (48, 57), (69, 69), (101, 101)))
SPACES = Repeat(Chars(((9, 10), (13, 13), (32, 32))))
NUMBER = Chain((Repeat(Text("-"), 0, 1), Chars(((48, 57),)), Repeat(IN_NUMBERS)))
WORD = Choice((Text("true"), Text("false"), Text("null")))
LIKE_JSON = Chain((SPACES, Choice((Chain((Chars(((34, 34), (91, 91), (123, 123))), ANYTHING)), NUMBER, WORD)), SPACES))
"""Texts that are read as JSON where a property may be a string or something else."""

KINDS = ("string", "number", "boolean", "null", "array", "object")
FORBIDDEN = '<>"&\n'


@dataclass(frozen=True, slots=True)
class TagStyle:
    """A way to write properties: `{}` stands for the key, `{type}` for what `types` says of the value's kind."""

    begin: str
    end: str
    types: Mapping[str, str]  # kind -> what the tag says of it
    in_strings: str = ""  # no string may hold it; "": the end
    wraps: bool = False  # a line break may stand on both sides of a value
    nests: bool = False  # arrays and objects are written in tags, too
    item: str = ""  # the tag of an array's item, where it has no key

    def group(self, kind: str) -> str:
        """Returns what the tag says of a kind of value."""
        return self.types.get(kind, "")

    @property
    def marks(self) -> str:
        """Returns the text that no string may hold."""
        return self.in_strings or self.end


STRING_OR_NOT = dict.fromkeys(KINDS, "false") | {"string": "true"}
STYLES = {
    "qwen_xml": TagStyle("<parameter={}>", "</parameter>", {}, wraps=True),
    "minimax_xml": TagStyle('<parameter name="{}">', "</parameter>", {}),
    "step3_xml": TagStyle('<steptml:parameter name="{}">', "</steptml:parameter>", {}),
    "glm_xml": TagStyle("<arg_key>{}</arg_key>\n?<arg_value>", "</arg_value>", {}),
    "deepseek_xml": TagStyle('<｜DSML｜parameter name="{}" string="{type}">', "</｜DSML｜parameter>", STRING_OR_NOT),
    "deepseek_v4_1_xml": TagStyle(
        '<｜DSML｜ parameter name="{}" string="{type}">', "</｜DSML｜ parameter>", STRING_OR_NOT
    ),
    "kimi_k3_xml": TagStyle(
        '<|open|>argument key="{}" type="{type}"<|sep|>', "<|close|>argument<|sep|>", {kind: kind for kind in KINDS}
    ),
    "minimax_m3_xml": TagStyle(
        "]<]minimax[>[<{}>", "]<]minimax[>[</{}>", {}, in_strings="]<]minimax[>[", nests=True, item="item"
    ),
    "cohere_xml": TagStyle(
        '<cofl:value name="{}" type="{type}">',
        "</cofl:value>",
        dict.fromkeys(KINDS, "json") | {"string": "raw", "array": "list", "object": "dict"},
        nests=True,
    ),
}


def tagged(writer: SchemaWriter, node: ValueSet, style: TagStyle, excludes: Sequence[str]) -> Language:
    """Returns the texts of the objects of a node, without Terminals. Raises GrammarError, also where there are none."""
    shapes = writer.algebra.shape(node).objects
    if not shapes:
        raise GrammarError("it must allow an object: only properties can be written in tags")
    tags = _TaggedObjects(writer, style, excludes)
    language = writer.finished(choice(tags.object(shape) for shape in shapes))
    kept = kept_out(style, excludes)
    rules = {name: unmarked(without(rule, kept)) for name, rule in language.rules.items()}
    return replace(language, start=unmarked(without(language.start, kept)), rules=rules)


def kept_out(style: TagStyle, excludes: Sequence[str]) -> tuple[str, ...]:
    """Returns the texts that no JSON in a tag holds."""
    return (*excludes, *(() if style.nests else (style.marks,)))


def without_texts(language: Language, excludes: Sequence[str]) -> Language:
    """Returns the language with no string of JSON that holds one of these texts as it is written."""
    rules = {name: without(rule, excludes) for name, rule in language.rules.items()}
    branches = tuple(without(branch, excludes) for branch in language.branches)
    return replace(language, start=without(language.start, excludes), rules=rules, branches=branches)


def without(expression: Expression, excludes: Sequence[str]) -> Expression:
    """Returns the expression with no string of JSON, and no key, that holds one of these texts as it is written."""
    if not excludes:
        return expression
    match expression:
        case Terminal(Text(text)):
            return NOTHING if any(excluded in text for excluded in excludes) else expression
        case Terminal(Chain((Text(text), *_)) as item) if text.startswith('"'):
            return Terminal(Both(item, free_of(excludes)))
        case Chain(items):
            return chain(without(item, excludes) for item in items)
        case Choice(items):
            return choice(without(item, excludes) for item in items)
        case Repeat(item, least, most):
            return repeat(without(item, excludes), least, most)
    return expression


class _TaggedObjects:
    def __init__(self, writer: SchemaWriter, style: TagStyle, excludes: Sequence[str]) -> None:
        self._writer = writer
        self._style = style
        self._excluded = (*excludes, style.marks)
        self._known: dict[ValueSet, RuleCall] = {}

    def object(self, shape: ObjectShape) -> Expression:
        """Named properties in their order, then free ones. Raises GrammarError where they are counted."""
        members = [
            repeat(self._member(key, node), 1 if is_required else 0, 1)
            for key, (is_required, node) in shape.named.items()
        ]
        is_closed = members and not shape.is_open
        free = NOTHING if is_closed else choice(self._free(shape, shape.free))
        num_required = sum(is_required for is_required, _ in shape.named.values())
        is_bounded = shape.most is not None and (free != NOTHING or shape.most < len(members))
        if shape.needed or shape.least > num_required or is_bounded:
            raise GrammarError(
                '"minProperties", "maxProperties" and what asks for keys that are not in "properties" cannot be '
                "enforced in tags: name the properties that are required"
            )
        return chain((*members, repeat(free, 0, None), GAP))

    def _free(self, shape: ObjectShape, classes: Iterable[PropertySet]) -> Iterator[Expression]:
        named = StringSet.only(shape.named)
        for names, node in classes:
            if node is self._writer.algebra.nothing:
                continue
            key = Both(NAME, names.minus(named).expression if shape.named else names.expression)
            if not is_empty(key):
                yield choice(self._written(key, node))

    def _member(self, key: str, node: ValueSet) -> Expression:
        if not key or len(key) > MAX_KEY or any(char in FORBIDDEN for char in key):
            raise GrammarError(f"the property {echo(key)} cannot be written in a tag; rename it")
        return choice(self._written(Text(key), node))

    def _written(self, key: Expression, node: ValueSet) -> Iterator[Expression]:
        """The property, once for each thing that its tag can say of the value."""
        style = self._style
        for group, value in self._values(node).items():
            begin = style.begin.replace("{type}", group)
            yield chain((GAP, _filled(begin, key), value, _filled(style.end, key)))

    def _values(self, node: ValueSet) -> dict[str, Expression]:
        """The value's texts, by what the tag says of it."""
        shape = self._writer.algebra.shape(node)
        texts: dict[str, list[Expression]] = {}
        for kind, part in _by_kind(shape):
            texts.setdefault(self._style.group(kind), []).append(self._value(kind, part, node))
        has_others = not self._style.types and not shape.strings.is_empty() and len(texts.get("", ())) > 1
        if has_others:
            texts[""][0] = Both(texts[""][0], Not(self._wrapped(LIKE_JSON)))
        return {group: choice(options) for group, options in texts.items()}

    def _value(self, kind: str, part: ValueShape, whole: ValueSet) -> Expression:
        if kind == "string":
            return self._string(part.strings.expression)
        if self._style.nests and kind in ("array", "object"):
            return self._nested(part)
        node = self._writer.algebra.fixed(part)
        node.parts, node.origin = (whole,), whole.origin  # errors name the keyword that it comes from
        return self._wrapped(self._writer.value(node))

    def _string(self, texts: Expression) -> Expression:
        raw = Both(texts, free_of(self._excluded)) if texts != ANYTHING else free_of(self._excluded)
        if not self._style.wraps:
            return raw
        edges = Choice((Chain((BREAK, ANYTHING)), Chain((ANYTHING, BREAK))))
        return Choice((Chain((BREAK, raw, BREAK)), Both(raw, Not(edges))))

    def _wrapped(self, value: Expression) -> Expression:
        return Choice((value, Chain((BREAK, value, BREAK)))) if self._style.wraps else value

    def _nested(self, part: ValueShape) -> Expression:
        options: list[Expression] = [self._rule(shape) for shape in part.objects]
        for shape in part.arrays:
            if shape.prefix or shape.counts or shape.is_unique:
                raise GrammarError("arrays by position, counted or with unique items cannot be written in tags")
            options.append(repeat(choice(self._item(shape.rest)), shape.least, shape.most))
        return choice(options)

    def _rule(self, shape: ObjectShape) -> Expression:
        """Objects may hold themselves."""
        node = self._writer.algebra.fixed(ValueShape(objects=(shape,)))
        known = next((call for other, call in self._known.items() if other.shape == node.shape), None)
        if known is None:
            known = self._known[node] = self._writer.reserve()
            self._writer.define(known, self.object(shape))
        return known

    def _item(self, node: ValueSet) -> Iterator[Expression]:
        if self._style.item:
            yield from self._written(Text(self._style.item), node)
            return
        for group, value in self._values(node).items():
            begin = self._style.begin.replace("{type}", group).replace(' name="{}"', "")
            yield chain((Text(begin), value, Text(self._style.end)))


def _filled(tag: str, key: Expression) -> Expression:
    """A tag with its key; `\\n?` in it is a line break that may be missing."""
    parts: list[Expression] = []
    for at, text in enumerate(tag.split("{}")):
        parts += [key] if at else []
        for number, piece in enumerate(text.split("\n?")):
            parts += [*([GAP] if number else []), *([Text(piece)] if piece else [])]
    return chain(parts)


def _by_kind(shape: ValueShape) -> Iterator[tuple[str, ValueShape]]:
    """The parts of a set, kind by kind; strings come first."""
    nothing = ValueShape()
    if not shape.strings.is_empty():
        yield "string", replace(nothing, strings=shape.strings)
    if not shape.numbers.is_empty():
        yield "number", replace(nothing, numbers=shape.numbers)
    for kind, bits in (("null", shape.plain & 1), ("boolean", shape.plain & 6)):
        if bits:
            yield kind, replace(nothing, plain=bits)
    if shape.arrays:
        yield "array", replace(nothing, arrays=shape.arrays)
    if shape.objects:
        yield "object", replace(nothing, objects=shape.objects)
