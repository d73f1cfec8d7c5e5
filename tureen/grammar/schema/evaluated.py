"""unevaluatedProperties and unevaluatedItems: the schema's values in cases, by what the rest of it has evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from tureen.grammar.expression import GrammarError
from tureen.grammar.schema.algebra import Algebra
from tureen.grammar.schema.document import Schema, Scope
from tureen.grammar.schema.keywords import dependent
from tureen.grammar.schema.protocols import SubschemaReader
from tureen.grammar.schema.shapes import ArrayShape, Property, PropertySet, ValueSet

MAX_CASES = 64


class EvaluatedParts(NamedTuple):
    """The items and properties that have been evaluated."""

    keys: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    has_all_keys: bool = False
    items: int = 0  # from the first one on
    has_all_items: bool = False
    matching: frozenset[ValueSet] = frozenset()  # the items in any of these, wherever they are

    def with_(self, other: EvaluatedParts) -> EvaluatedParts:
        """Returns what either of them has evaluated."""
        return EvaluatedParts(
            self.keys | other.keys,
            self.patterns | other.patterns,
            self.has_all_keys or other.has_all_keys,
            max(self.items, other.items),
            self.has_all_items or other.has_all_items,
            self.matching | other.matching,
        )


Cases = dict[EvaluatedParts, ValueSet]
"""A value that is in some of the nodes is valid. Where it is in several, each has been evaluated as it says.

What one case says was evaluated may be less than what was, if the value is in the case that says more, too: the less
was evaluated, the fewer values pass "unevaluated…". So cases may overlap, and "anyOf" needs no complements.
"""


class Evaluated:
    """Finds the cases of schemas."""

    def __init__(self, reader: SubschemaReader, algebra: Algebra) -> None:
        self._reader = reader
        self._algebra = algebra

    def node(self, schema: dict[str, Any], scope: Scope) -> ValueSet:
        """Returns the values of a schema with "unevaluated…". Raises GrammarError."""
        return self._algebra.any_of(self._cases(schema, scope).values())

    def _cases(self, schema: Schema, scope: Scope) -> Cases:
        """Returns the cases of a schema as a whole. Raises GrammarError."""
        if isinstance(schema, bool):
            return {EvaluatedParts(): self._reader.node(schema, scope)} if schema else {}
        self._reader.go_inside(schema)
        try:
            scope = self._reader.enter(schema, scope)
            known = {self._seen(schema, scope): self._reader.own(schema, scope)}
            for cases in self._in_place(schema, scope):
                known = self._joined((old.with_(new), (known[old], cases[new])) for old in known for new in cases)
            for keyword in ("unevaluatedProperties", "unevaluatedItems"):
                if keyword in schema:
                    inside = self._reader.later(schema[keyword], scope)
                    known = self._joined(self._closed(keyword, seen, node, inside) for seen, node in known.items())
            return known
        finally:
            self._reader.come_out()

    def _seen(self, schema: dict[str, Any], scope: Scope) -> EvaluatedParts:
        contains = schema.get("contains")
        return EvaluatedParts(
            frozenset(schema.get("properties", ())),
            frozenset(schema.get("patternProperties", ())),
            "additionalProperties" in schema,
            len(schema.get("prefixItems", ())),
            "items" in schema,
            frozenset() if contains is None else frozenset([self._reader.later(contains, scope)]),
        )

    def _in_place(self, schema: dict[str, Any], scope: Scope) -> Iterator[Cases]:
        algebra, reader = self._algebra, self._reader
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                yield self._cases(reader.target(keyword, schema, scope), scope)
        for part in schema.get("allOf", ()):
            yield self._cases(part, scope)
        if "anyOf" in schema:
            yield self._any([self._cases(part, scope) for part in schema["anyOf"]])
        if "oneOf" in schema:
            yield self._one(schema["oneOf"], scope)
        if "not" in schema:
            yield {EvaluatedParts(): algebra.none_of(reader.node(schema["not"], scope))}
        if "if" in schema:
            condition = reader.node(schema["if"], scope)
            then = self._both(self._cases(schema["if"], scope), self._cases(schema.get("then", True), scope))
            otherwise = self._cases(schema.get("else", True), scope)
            yield self._either(then, self._both({EvaluatedParts(): algebra.none_of(condition)}, otherwise))
        for key, part in dependent(schema):
            having = reader.having(key)
            needed = {EvaluatedParts(): reader.having(*part)} if isinstance(part, list) else self._cases(part, scope)
            yield self._either(
                self._both({EvaluatedParts(): having}, needed), {EvaluatedParts(): algebra.none_of(having)}
            )

    def _any(self, branches: list[Cases]) -> Cases:
        result: Cases = {}
        for branch in branches:
            result = self._either(result, branch, self._both(result, branch))
        return result

    def _one(self, parts: list[Schema], scope: Scope) -> Cases:
        algebra = self._algebra
        nodes = [self._reader.node(part, scope) for part in parts]
        result: Cases = {}
        for index, part in enumerate(parts):
            others = [
                algebra.none_of(other)
                for other in nodes[:index] + nodes[index + 1 :]
                if not algebra.is_nothing(algebra.all_of((nodes[index], other)))
            ]
            result = self._either(
                result, self._both({EvaluatedParts(): algebra.all_of(others)}, self._cases(part, scope))
            )
        return result

    def _both(self, first: Cases, second: Cases) -> Cases:
        return self._joined((left.with_(right), (first[left], second[right])) for left in first for right in second)

    def _either(self, *several: Cases) -> Cases:
        by_seen: dict[EvaluatedParts, list[ValueSet]] = {}
        for cases in several:
            for seen, node in cases.items():
                by_seen.setdefault(seen, []).append(node)
        return {seen: self._algebra.any_of(nodes) for seen, nodes in by_seen.items()}

    def _joined(self, pairs: Iterable[tuple[EvaluatedParts, tuple[ValueSet, ...]]]) -> Cases:
        """Each pair a case that needs all its nodes."""
        by_seen: dict[EvaluatedParts, list[ValueSet]] = {}
        for seen, nodes in pairs:
            node = self._algebra.all_of(nodes)
            if node is not self._algebra.nothing:
                by_seen.setdefault(seen, []).append(node)
        if len(by_seen) > MAX_CASES:
            raise GrammarError(
                '"unevaluatedProperties" or "unevaluatedItems" beside combinators is too large: more than'
                f" {MAX_CASES} cases of what is evaluated"
            )
        return {seen: self._algebra.any_of(nodes) for seen, nodes in by_seen.items()}

    def _closed(
        self, keyword: str, seen: EvaluatedParts, node: ValueSet, inside: ValueSet
    ) -> tuple[EvaluatedParts, tuple[ValueSet, ...]]:
        """A case in which what has not been evaluated is in `inside`."""
        algebra = self._algebra
        if keyword == "unevaluatedItems":
            if seen.has_all_items:
                return seen, (node,)
            rest = algebra.any_of([inside, *seen.matching])
            arrays = (ArrayShape((algebra.anything,) * seen.items, rest),)
            closed = algebra.fixed(replace(algebra.any_shape, arrays=arrays))
            return seen._replace(has_all_items=True), (node, closed)
        if seen.has_all_keys:
            return seen, (node,)
        classes = [(algebra.keys.every, inside)]
        for pattern in seen.patterns:
            parts = algebra.keys.split(classes, algebra.keys.pattern(pattern))
            classes = [(names, algebra.anything if is_inside else value) for names, value, is_inside in parts]
        named = {key: Property(False, algebra.anything) for key in sorted(seen.keys)}
        shape = replace(
            algebra.any_object, named=named, free=tuple(PropertySet(*item) for item in classes), is_open=True
        )
        closed = algebra.fixed(replace(algebra.any_shape, objects=(shape,)))
        return seen._replace(has_all_keys=True), (node, closed)
