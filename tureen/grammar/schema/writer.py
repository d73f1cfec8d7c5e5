"""Writes sets of JSON values as the rules of a language whose terminals are the tokens of JSON."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from tureen.grammar.expression import NOTHING, Expression, GrammarError, Language, RuleCall
from tureen.grammar.rules import calls, can_end, choice, holding, reachable, replaced
from tureen.grammar.schema.algebra import Algebra
from tureen.grammar.schema.numbers import NumberSet
from tureen.grammar.schema.shapes import ArrayShape, ObjectShape, ValueSet, ValueShape
from tureen.grammar.schema.strings import StringSet
from tureen.grammar.schema.unenforced import Origin
from tureen.grammar.schema.write_arrays import WORDS, write_array
from tureen.grammar.schema.write_objects import write_object

MAX_RULES = 50_000


class NoValueError(GrammarError):
    """There is no text of what was to be written."""


class SchemaWriter:
    """Writes nodes as rules, each node once, whose names begin with `prefix`."""

    def __init__(self, algebra: Algebra, prefix: str, *, leaves_out: bool) -> None:
        """`leaves_out`: of an object with properties, keys that its schema does not speak of are not written."""
        self.algebra = algebra
        self.leaves_out = leaves_out
        self._prefix = prefix
        self._rules: dict[str, Expression] = {}
        self._written: dict[ValueSet, Expression] = {algebra.nothing: NOTHING}
        self._waiting: list[tuple[RuleCall, ValueSet]] = []
        self._node = algebra.anything  # that is being written
        self._shapes: dict[Hashable, tuple[ArrayShape | ObjectShape, Expression]] = {}  # that have been written
        self._num_left_out = 0
        self._ending: set[str] = set()  # the rules of which it is known that something fits them
        self._number = 0

    def language(self, node: ValueSet) -> Language:
        """Returns the texts of the node's values. Raises GrammarError, also where there are none."""
        return self.finished(self.value(node))

    def finished(self, start: Expression) -> Language:
        """Returns the language of an expression that calls rules of this writer. Raises GrammarError if it is empty."""
        while self._waiting:
            call, self._node = self._waiting.pop()
            self.define(call, self._body(call, self.algebra.shape(self._node)))
        rules = self._rules
        unsure = {name: rule for name, rule in rules.items() if name not in self._ending}
        self._ending = holding(unsure, can_end, self._ending)
        dead = unsure.keys() - self._ending
        if start == NOTHING or (isinstance(start, RuleCall) and start.name in dead):
            raise NoValueError("no JSON value is valid against this schema")
        if dead:
            rules = {
                name: rule
                if dead.isdisjoint(calls(rule))
                else replaced(rule, lambda n: NOTHING if n in dead else RuleCall(n))
                for name, rule in rules.items()
            }
            rules = reachable(start, rules)
        return Language(start, rules, is_live=True)

    def value(self, node: ValueSet) -> Expression:
        """Returns the texts of a node's values: a call where they hold others."""
        written = self._written.get(node)
        if written is None:
            shape = self.algebra.shape(node)
            if shape.arrays or shape.objects:
                written = self.reserve()
                self._waiting.append((written, node))
            else:
                before, self._node = self._node, node
                written = choice(self._scalars(shape))
                self._node = before
            self._written[node] = written
        return written

    def reserve(self) -> RuleCall:
        """Returns a call of a new rule, to be defined."""
        name = f"{self._prefix}v{self._number}"
        self._number += 1
        if self._number > MAX_RULES:
            raise GrammarError(f"json_schema is too large: it needs more than {MAX_RULES} rules")
        return RuleCall(name)

    def define(self, call: RuleCall, expression: Expression) -> None:
        self._rules[call.name] = expression

    def rule(self, expression: Expression) -> Expression:
        """Returns a call of a new rule."""
        call = self.reserve()
        self.define(call, expression)
        return call

    def leave_out(self, keyword: str, why: str, *, to_guard: bool = False) -> None:
        """Notes that a keyword of what is being written ("": the one that it comes from) is not enforced; `to_guard`:
        unless a guard does it."""
        self._num_left_out += 1
        holder = whole(self._node) if to_guard else None
        self.algebra.unenforced.note(why, _origin(self._node, keyword), holder)

    @property
    def written(self) -> Iterable[ValueSet]:
        """The sets that have been written."""
        return map(whole, self._written)

    def shape_of(self, node: ValueSet, shape: ArrayShape | ObjectShape) -> Expression:
        """Returns the texts of one of the shapes of a set that has been written."""
        self._node = node
        return self._once(shape)

    def _body(self, call: RuleCall, shape: ValueShape) -> Expression:
        """Returns the texts of a shape, which the rule of `call` will be."""
        scalars = self._scalars(shape)
        inside: list[ArrayShape | ObjectShape] = [*shape.arrays, *shape.objects]
        if not scalars and len(inside) == 1:
            return self._once(inside[0], call)
        return choice((*scalars, *(self._once(item) for item in inside)))

    def _scalars(self, shape: ValueShape) -> list[Expression]:
        texts: list[Expression] = [word for bit, word in WORDS if shape.plain & bit]
        if not shape.numbers.is_empty():
            texts.append(self._either_way("multipleOf", shape.numbers, shape.numbers.without_steps()))
        try:
            is_empty = shape.strings.is_empty()
        except GrammarError as error:
            self.leave_out("pattern", str(error))
            return [*texts, StringSet.anything().encoded()]
        return texts if is_empty else [*texts, self._either_way("pattern", shape.strings, StringSet.anything())]

    def _either_way(self, keyword: str, texts: NumberSet | StringSet, more: NumberSet | StringSet) -> Expression:
        """Returns the texts; more of them where they cannot be written because of the keyword."""
        try:
            return texts.encoded()
        except GrammarError as error:
            self.leave_out(keyword, str(error), to_guard=keyword == "multipleOf")
            return more.encoded()

    def _once(self, shape: ArrayShape | ObjectShape, call: RuleCall | None = None) -> Expression:
        """Returns the texts of a shape, which may be in several sets: it has a rule, that of `call` or a new one.

        One of which something is left out has none: that is noted of each set.
        """
        content = _content(shape)
        _, known = self._shapes.get(content, (None, None))
        if known is not None:
            return known
        num_left_out = self._num_left_out
        written = write_array(self, shape) if isinstance(shape, ArrayShape) else write_object(self, shape)
        if self._num_left_out > num_left_out or written == NOTHING:
            return written
        known = call or self.rule(written)
        self._shapes[content] = shape, known
        return written if call else known


def _content(shape: ArrayShape | ObjectShape) -> Hashable:
    """Returns what is the same for shapes that are the same, as far as that is cheap to tell, while they are there."""
    if isinstance(shape, ArrayShape):
        return shape
    free = [(id(names), node) for names, node in shape.free]
    needed = [(id(names), node) for names, node in shape.needed]
    return (tuple(shape.named.items()), tuple(free), shape.least, shape.most, tuple(needed), shape.is_open)


def whole(node: ValueSet) -> ValueSet:
    """Returns the set that one with the values of some kinds is a part of; itself where it is no such part."""
    return node.parts[0] if node.kind == "leaf" and node.parts else node


def _origin(node: ValueSet, keyword: str) -> Origin:
    """Returns where a set has a keyword ("": any) from, as far as that is known."""
    known = _known_origin(node, keyword)
    while node.parts:
        node = node.parts[0]
    return known or Origin(node.origin.keyword or keyword, node.origin.schema)


def _known_origin(node: ValueSet, keyword: str) -> Origin | None:
    schema = node.origin.schema
    if keyword and isinstance(schema, dict) and keyword in schema:
        return Origin(keyword, schema)
    if node.origin.keyword and keyword in ("", node.origin.keyword):
        return node.origin
    return next(filter(None, (_known_origin(part, keyword) for part in node.parts)), None)
