"""The keywords of a schema that its language does not keep, and where the values are that may break them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from tureen.errors import echo
from tureen.grammar.expression import GrammarError, SchemaError, Unenforced
from tureen.grammar.schema.document import Document, Schema

REFERENCES = ("$ref", "$dynamicRef")
SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
MEMBERS = ("additionalProperties", "unevaluatedProperties", "propertyNames")
ITEMS = ("items", "contains", "unevaluatedItems")

T = TypeVar("T")


class Origin(NamedTuple):
    """The keyword, and the schema with it, that a set of values comes from."""

    keyword: str
    schema: Schema


class UnenforcedKeywords:
    """Notes each keyword that is left out, with the reason: the first that was seen counts.

    What is left out makes the language larger, never smaller: so a set that is not exactly known is never complemented
    as if it were.
    """

    def __init__(self, document: Document, *, strict: bool, guards: bool = False) -> None:
        """`strict`: none may be left out, but for a guard, if there are such."""
        self._guards = guards
        self._document = document
        self._strict = strict
        self._noted: dict[tuple[str, int], tuple[Origin, str]] = {}
        self._holders: dict[tuple[str, int], set[Hashable]] = {}
        self._hopeless: set[tuple[str, int]] = set()  # also noted of what no guard can do
        self._also: dict[tuple[str, int], dict[tuple[str, int], Origin]] = {}  # where else a set is from
        self.origin = Origin("", document.root)  # of what is being worked out

    def at(self, origin: Origin) -> Meanwhile:
        """Names the keyword because of which something is left out meanwhile."""
        return Meanwhile(self, origin)

    def note(self, why: str, origin: Origin | None = None, holder: Hashable | None = None) -> None:
        """Notes that a keyword, without one that which is being worked out, is left out. Raises SchemaError if
        strict. `holder`: the set of values with which a guard may enforce it."""
        origin = origin or self.origin
        where = self._document.where(origin.schema)
        why = why if where in why else f"{why} (at {where})"
        if self._strict and (holder is None or not self._guards):
            raise SchemaError(why)
        key = (origin.keyword, id(origin.schema))
        self._noted.setdefault(key, (origin, why))
        if holder is None:
            self._hopeless.add(key)
        else:
            self._holders.setdefault(key, set()).add(holder)

    def also_from(self, origin: Origin) -> None:
        """Notes that a set that comes from `origin` is what is being worked out, too."""
        if origin is not self.origin and self.origin.keyword:
            others = self._also.setdefault((origin.keyword, id(origin.schema)), {})
            others[self.origin.keyword, id(self.origin.schema)] = self.origin

    @property
    def holders(self) -> Mapping[str, set[Hashable]]:
        """The sets of values with which a guard may enforce a keyword, by keyword."""
        holders: dict[str, set[Hashable]] = {}
        for (keyword, _), some in self._holders.items():
            holders.setdefault(keyword, set()).update(some)
        return holders

    def sorted_out(self, unsure: Mapping[Any, str]) -> tuple[tuple[Unenforced, ...], tuple[Unenforced, ...]]:
        """Returns all that was noted: what a guard enforces, and what nothing does.

        `unsure`: the sets of values that the guard may miss, each with the reason. The reason "" is the one that
        was noted.
        """
        guarded: list[Unenforced] = []
        left: list[Unenforced] = []
        for key, item in self._listed():
            reasons = {unsure[holder] for holder in self._holders.get(key, ()) if holder in unsure}
            if key in self._hopeless or "" in reasons:
                left.append(item)
            elif reasons:
                left.append(item._replace(why=self._explained(item, min(reasons))))
            else:
                guarded.append(item)
        return tuple(guarded), tuple(left)

    def _explained(self, item: Unenforced, reason: str) -> str:
        instead = 'Simplify the schema or leave "strict" out' if self._strict else "Simplify the schema"
        return f'"{item.keyword}" cannot be enforced: {reason}. {instead} (at {echo(item.schema)})'

    def attempt(self, make: Callable[[], T], otherwise: T, origin: Origin | None = None) -> T:
        """Returns what `make` makes; `otherwise`, and the keyword is noted, where it cannot be made. Raises
        SchemaError."""
        try:
            return make()
        except SchemaError:
            raise
        except GrammarError as error:
            self.note(str(error), origin)
            return otherwise

    def listed(self) -> tuple[Unenforced, ...]:
        """Returns all that was noted."""
        return tuple(item for _, item in self._listed())

    def _listed(self) -> Iterator[tuple[tuple[str, int], Unenforced]]:
        """Yields all that was noted, each by its key, in every place where a schema says it."""
        places = _places(self._document) if self._noted else {}
        told = set(self._noted)
        for key, (noted, why) in self._noted.items():
            where = self._document.where(noted.schema)
            for origin in (noted, *self._also.get(key, {}).values()):
                for schema in self._alike(origin):
                    is_first = schema is noted.schema and origin is noted
                    other = (origin.keyword, id(schema))
                    if is_first or (id(schema) in places and other not in told):
                        told.add(other)
                        pointer = self._document.pointer(schema)
                        reason = why.replace(where, self._document.where(schema))
                        yield key, Unenforced(origin.keyword, places.get(id(schema), pointer), pointer, reason)

    def _alike(self, origin: Origin) -> Sequence[Schema]:
        """Returns the schemas that say the same keyword as one, or from whose "oneOf" it follows; just that one where
        it is neither, but near to what says it."""
        schema = origin.schema
        if isinstance(schema, dict) and (origin.keyword in schema or "oneOf" in schema):
            return self._document.all_like(schema)
        return (schema,)


class Meanwhile:
    """Names a keyword as that which is being worked out, from where it is entered until it is left."""

    __slots__ = ("_other", "_unenforced")

    def __init__(self, unenforced: UnenforcedKeywords, origin: Origin) -> None:
        self._unenforced = unenforced
        self._other = origin  # the one that is not named now

    def __enter__(self) -> None:
        self._unenforced.origin, self._other = self._other, self._unenforced.origin

    def __exit__(self, *_: object) -> None:
        self._unenforced.origin, self._other = self._other, self._unenforced.origin


def _places(document: Document) -> dict[int, str]:
    """Returns, for each schema that can be reached, the shortest place of a value that it is about."""
    places: dict[int, str] = {}
    waiting: deque[tuple[Any, str]] = deque([(document.root, "")])
    while waiting:
        schema, place = waiting.popleft()
        if isinstance(schema, dict) and id(schema) not in places:
            places[id(schema)] = place
            waiting += _inside(document, schema, place)
    return places


def _inside(document: Document, schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Yields the schemas in one, which may be of any form: not all of it need have been read."""
    for keyword in REFERENCES:
        if keyword in schema:
            with suppress(SchemaError, AttributeError, TypeError):
                yield document.resolve(schema[keyword], schema)[0], place
    for keyword in SAME_VALUE:
        if keyword in schema:
            yield from ((item, place) for item in _several(schema[keyword]))
    yield from ((item, place) for item in _named(schema, "dependentSchemas").values())
    for key, item in _named(schema, "properties").items():
        yield item, f"{place}/{key.replace('~', '~0').replace('/', '~1')}"
    for index, item in enumerate(_several(schema.get("prefixItems"))):
        yield item, f"{place}/{index}"
    yield from ((schema[keyword], f"{place}/*") for keyword in (*ITEMS, *MEMBERS) if keyword in schema)
    yield from ((item, f"{place}/*") for item in _named(schema, "patternProperties").values())


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _named(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    inside = schema.get(keyword)
    return inside if isinstance(inside, dict) else {}
