"""The parts of the schema compiler that need each other, as the callee sees its caller.

A JSON value holds values: what works on arrays and objects is called by, and calls, what works on all values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from tureen.grammar.expression import Expression, RuleCall
from tureen.grammar.schema.document import Schema, Scope
from tureen.grammar.schema.key_sets import KeySets
from tureen.grammar.schema.shapes import ArrayShape, ObjectShape, ValueSet, ValueShape
from tureen.grammar.schema.unenforced import UnenforcedKeywords
from tureen.grammar.schema.unions import Unions


class SetAlgebra(Protocol):
    """Set operations on nodes, as the arrays and objects that hold these nodes need them. See Algebra."""

    keys: KeySets
    nothing: ValueSet
    anything: ValueSet
    any_array: ArrayShape
    any_object: ObjectShape
    any_shape: ValueShape
    no_shape: ValueShape
    arrays: Unions[ArrayShape]
    objects: Unions[ObjectShape]
    unenforced: UnenforcedKeywords

    def all_of(self, nodes: Iterable[ValueSet]) -> ValueSet: ...

    def both(self, first: ValueSet, second: ValueSet) -> ValueSet: ...

    def none_of(self, node: ValueSet) -> ValueSet: ...

    def covers(self, node: ValueSet, other: ValueSet) -> bool: ...

    def is_nothing(self, node: ValueSet) -> bool: ...

    def narrowed(self, shape: ValueShape, node: ValueSet) -> ValueShape: ...

    def shape(self, node: ValueSet) -> ValueShape: ...

    def meet(self, first: ValueShape, second: ValueShape) -> ValueShape: ...


class SubschemaReader(Protocol):
    """Reads schemas inside a schema, as the keywords "unevaluated…" need it. See Reader."""

    def node(self, schema: Schema, scope: Scope) -> ValueSet: ...

    def own(self, schema: dict[str, Any], scope: Scope) -> ValueSet: ...

    def later(self, schema: Schema, scope: Scope) -> ValueSet: ...

    def enter(self, schema: Schema, scope: Scope) -> Scope: ...

    def go_inside(self, schema: Schema) -> None: ...

    def come_out(self) -> None: ...

    def target(self, keyword: str, schema: dict[str, Any], scope: Scope) -> Schema: ...

    def having(self, *keys: str) -> ValueSet: ...


class RuleWriter(Protocol):
    """Writes the values inside arrays and objects as rules. See Writer."""

    leaves_out: bool

    def leave_out(self, keyword: str, why: str, *, to_guard: bool = False) -> None: ...

    @property
    def algebra(self) -> SetAlgebra: ...

    def value(self, node: ValueSet) -> Expression: ...

    def reserve(self) -> RuleCall: ...

    def define(self, call: RuleCall, expression: Expression) -> None: ...

    def rule(self, expression: Expression) -> Expression: ...
