"""Reads a schema into the set of its values: combinators and references here, a schema's own keywords in `own`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tureen.grammar.expression import GrammarError, SchemaError
from tureen.grammar.schema.algebra import MAX_NODES, Algebra
from tureen.grammar.schema.document import Document, Schema, Scope
from tureen.grammar.schema.emptiness import CircularError
from tureen.grammar.schema.evaluated import Evaluated
from tureen.grammar.schema.keywords import check
from tureen.grammar.schema.own import OWN_KEYWORDS, Own
from tureen.grammar.schema.shapes import ALL_KINDS, OBJECTS, Property, ValueSet, ValueShape
from tureen.grammar.schema.unenforced import Origin, UnenforcedKeywords

MAX_IN_PLACE = 40
"""The deepest nesting of schemas about the same value: allOf in anyOf in not, "$ref" to "$ref"."""


class SchemaReader:
    """Reads the schemas of one document, each when it is needed."""

    def __init__(self, document: Document, algebra: Algebra, unenforced: UnenforcedKeywords) -> None:
        self._document = document
        self._algebra = algebra
        self._unenforced = unenforced
        self._own = Own(document, algebra, self.node, unenforced)
        self._nodes: dict[tuple[int, Scope], ValueSet | None] = {}
        self._evaluated = Evaluated(self, algebra)
        self._having: dict[tuple[str, ...], ValueSet] = {}
        self._depth = 0

    def node(self, schema: Schema, scope: Scope) -> ValueSet:
        """Returns the values that are valid against the schema. Raises GrammarError."""
        if isinstance(schema, bool):
            return self._algebra.anything if schema else self._algebra.nothing
        scope = self.enter(schema, scope)
        key = (id(self._document.all_like(schema)[0]), scope)
        if key not in self._nodes:
            if scope and len(self._nodes) >= MAX_NODES:
                raise SchemaError(f'"$dynamicRef" leads to more than {MAX_NODES} different schemas, by the ways there')
            self._nodes[key] = None
            try:
                self._nodes[key] = self._build(schema, scope)
            finally:
                if self._nodes[key] is None:
                    del self._nodes[key]
        node = self._nodes[key]
        if node is None:
            raise CircularError(
                f'the schema at {self._document.where(schema)} is defined by itself ("$ref" in a circle,'
                f" without a property or an item between)"
            )
        return node

    def own(self, schema: dict[str, Any], scope: Scope) -> ValueSet:
        """Returns the values that the schema allows without its combinators and references."""
        if OWN_KEYWORDS.isdisjoint(schema):
            return self._algebra.anything
        return ValueSet("leaf", Origin("", schema), (), partial(self._read_own, schema, scope))

    def _read_own(self, schema: dict[str, Any], scope: Scope) -> ValueShape:
        try:
            return self._own.read(schema, scope)
        except SchemaError as error:
            where = self._document.where(schema)
            if where in str(error):
                raise
            raise type(error)(f"{error} (at {where})") from None
        except GrammarError as error:
            keyword = next(keyword for keyword in schema if keyword in OWN_KEYWORDS)
            self._unenforced.note(str(error), Origin(keyword, schema))
            return replace(self._algebra.any_shape, loose=ALL_KINDS)

    def later(self, schema: Schema, scope: Scope) -> ValueSet:
        """Returns the schema's values, also while the schema around it is being read."""
        try:
            return self.node(schema, scope)
        except CircularError:
            return self._algebra.leaf(lambda: self._algebra.shape(self.node(schema, scope)))

    def enter(self, schema: Schema, scope: Scope) -> Scope:
        if not self._document.has_dynamic:
            return ()
        resource = self._document.resource(schema)
        known = {name for outer in scope for name in outer.dynamic}  # the outermost of a name is meant
        return scope if resource.dynamic.keys() <= known else (*scope, resource)

    def _build(self, schema: dict[str, Any], scope: Scope) -> ValueSet:
        check(schema, self._document)
        self.go_inside(schema)
        try:
            if COMBINED.isdisjoint(schema):  # as of most
                return self.own(schema, scope)
            for keyword in ("unevaluatedProperties", "unevaluatedItems"):
                if keyword in schema:
                    node = self._with_unevaluated(keyword, schema, scope)
                    if node is not None:
                        return node
            return self._algebra.all_of((self.own(schema, scope), *self._in_place(schema, scope)))
        finally:
            self.come_out()

    def _with_unevaluated(self, keyword: str, schema: dict[str, Any], scope: Scope) -> ValueSet | None:
        """Returns the values of a schema with such a keyword; None where it cannot be enforced."""
        origin = Origin(keyword, schema)
        with self._unenforced.at(origin):
            return self._unenforced.attempt(lambda: self._evaluated.node(schema, scope), None)

    def go_inside(self, schema: Schema) -> None:
        """Counts how deep schemas about the same value are inside one another; `come_out` must follow. Raises
        GrammarError where it is too deep."""
        if self._depth >= MAX_IN_PLACE:
            raise SchemaError(
                f"schemas inside one another about the same value at {self._document.where(schema)};"
                f" at most {MAX_IN_PLACE} levels"
            )
        self._depth += 1

    def come_out(self) -> None:
        """Ends what `go_inside` began."""
        self._depth -= 1

    def _in_place(self, schema: dict[str, Any], scope: Scope) -> Iterator[ValueSet]:
        """The values that each combinator and reference of the schema allows."""
        for keyword, make in IN_PLACE.items():
            if keyword in schema:
                with self._unenforced.at(Origin(keyword, schema)):
                    read = partial(make, self, keyword, schema, scope)
                    node = self._unenforced.attempt(read, self._algebra.anything)
                yield node

    def _referred(self, keyword: str, schema: dict[str, Any], scope: Scope) -> ValueSet:
        return self.node(self.target(keyword, schema, scope), scope)

    def _all_of(self, _: str, schema: dict[str, Any], scope: Scope) -> ValueSet:
        return self._algebra.all_of([self.node(part, scope) for part in schema["allOf"]])

    def _any_of(self, _: str, schema: dict[str, Any], scope: Scope) -> ValueSet:
        return self._algebra.any_of([self.node(part, scope) for part in schema["anyOf"]])

    def _none_of(self, _: str, schema: dict[str, Any], scope: Scope) -> ValueSet:
        return self._algebra.none_of(self.node(schema["not"], scope))

    def _condition(self, _: str, schema: dict[str, Any], scope: Scope) -> ValueSet:
        algebra = self._algebra
        if "then" not in schema and "else" not in schema:
            return algebra.anything
        condition = self.node(schema["if"], scope)
        then = algebra.all_of((condition, self.node(schema.get("then", True), scope)))
        otherwise = algebra.all_of((algebra.none_of(condition), self.node(schema.get("else", True), scope)))
        return algebra.any_of((then, otherwise))

    def _dependent(self, keyword: str, schema: dict[str, Any], scope: Scope) -> ValueSet:
        algebra, nodes = self._algebra, []
        for key, part in schema[keyword].items():
            needed = self.having(*part) if isinstance(part, list) else self.node(part, scope)
            nodes.append(
                algebra.any_of((algebra.none_of(self.having(key)), algebra.all_of((self.having(key), needed))))
            )
        return algebra.all_of(nodes)

    def _one_of(self, _: str, schema: dict[str, Any], scope: Scope) -> ValueSet:
        """OpenAPI's discriminator names a property that every branch must have, whether it requires it or not."""
        algebra, nodes = self._algebra, [self.node(part, scope) for part in schema["oneOf"]]
        if "discriminator" not in schema:
            return algebra.one_of(nodes)
        having = self.having(schema["discriminator"]["propertyName"])
        exactly_one = algebra.one_of([algebra.all_of((node, having)) for node in nodes])
        return algebra.leaf(lambda: replace(algebra.shape(exactly_one), partial=OBJECTS))

    def target(self, keyword: str, schema: dict[str, Any], scope: Scope) -> Schema:
        """Returns the schema that "$ref" or "$dynamicRef" refers to. Raises GrammarError."""
        target, resource, fragment = self._document.resolve(schema[keyword], schema)
        if keyword == "$dynamicRef" and resource.dynamic.get(fragment) is target:
            return next((outer.dynamic[fragment] for outer in scope if fragment in outer.dynamic), target)
        return target

    def having(self, *keys: str) -> ValueSet:
        """Returns objects with these keys, and no other values."""
        node = self._having.get(keys)
        if node is None:
            anything = Property(True, self._algebra.anything)
            shape = replace(self._algebra.any_object, named=dict.fromkeys(keys, anything))
            node = self._having[keys] = self._algebra.fixed(ValueShape(objects=(shape,)))
        return node


IN_PLACE: Mapping[str, Callable[[SchemaReader, str, dict[str, Any], Scope], ValueSet]] = {
    "$ref": SchemaReader._referred,
    "$dynamicRef": SchemaReader._referred,
    "allOf": SchemaReader._all_of,
    "anyOf": SchemaReader._any_of,
    "oneOf": SchemaReader._one_of,
    "not": SchemaReader._none_of,
    "if": SchemaReader._condition,
    "dependentRequired": SchemaReader._dependent,
    "dependentSchemas": SchemaReader._dependent,
}
COMBINED = frozenset((*IN_PLACE, "unevaluatedProperties", "unevaluatedItems"))
