"""The parts of the schema compiler that need each other, as the callee sees its caller.

A JSON value holds values: what works on arrays and objects is called by, and calls, what works on all values.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tureen.grammar.expression import Call, Expression
from tureen.grammar.schema.document import Schema, Scope
from tureen.grammar.schema.key_sets import KeySets
from tureen.grammar.schema.shapes import ArrayShape, Node, ObjectShape, Shape


class NodeAlgebra(Protocol):
    """Set operations on nodes, as the arrays and objects that hold these nodes need them. See Algebra."""

    keys: KeySets
    nothing: Node
    anything: Node
    any_array: ArrayShape
    any_object: ObjectShape

    def all_of(self, nodes: Iterable[Node]) -> Node: ...

    def none_of(self, node: Node) -> Node: ...

    def covers(self, node: Node, other: Node) -> bool: ...

    def is_nothing(self, node: Node) -> bool: ...

    def shape(self, node: Node) -> Shape: ...


class SchemaReader(Protocol):
    """Reads schemas inside a schema, as the keywords "unevaluated…" need it. See Reader."""

    def node(self, schema: Schema, scope: Scope) -> Node: ...

    def own(self, schema: dict[str, Any], scope: Scope) -> Node: ...

    def later(self, schema: Schema, scope: Scope) -> Node: ...

    def enter(self, schema: Schema, scope: Scope) -> Scope: ...

    def inside(self, schema: Schema) -> AbstractContextManager[None]: ...

    def target(self, keyword: str, schema: dict[str, Any], scope: Scope) -> Schema: ...

    def having(self, *keys: str) -> Node: ...


class RuleWriter(Protocol):
    """Writes the values inside arrays and objects as rules. See Writer."""

    leaves_out: bool

    @property
    def algebra(self) -> NodeAlgebra: ...

    def value(self, node: Node) -> Expression: ...

    def reserve(self) -> Call: ...

    def define(self, call: Call, expression: Expression) -> None: ...

    def rule(self, expression: Expression) -> Expression: ...
