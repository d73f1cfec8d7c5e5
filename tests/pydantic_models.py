"""Models as people write them with pydantic, by name; the schemas of all stand in golden/pydantic_schemas.json."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

from annotated_types import Len
from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    Base64Str,
    BaseModel,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    HttpUrl,
    Json,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RootModel,
    SecretStr,
    StrictBool,
    StrictInt,
    StringConstraints,
    Tag,
    computed_field,
    conint,
    conlist,
    constr,
)
from pydantic.dataclasses import dataclass as checked_dataclass
from typing_extensions import TypedDict

T = TypeVar("T")


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Person(BaseModel):
    name: str
    age: int


class WithOptional(BaseModel):
    nickname: str | None = None
    born: date | None
    score: float | None = Field(default=None, ge=0, le=1)


class WithUnion(BaseModel):
    value: int | str | bool | None
    many: list[int | str] = Field(max_length=3)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    is_good: bool = True


class WithDiscriminated(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")


class WithDiscriminatedList(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(max_length=3)


def _kind_of(value: Any) -> str:
    return "cat" if (value.get("kind") if isinstance(value, dict) else value.kind) == "cat" else "dog"


class WithCallableDiscriminator(BaseModel):
    pet: Annotated[Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")], Discriminator(_kind_of)]


class WithSet(BaseModel):
    colours: set[Colour]
    flags: set[bool]


class WithFreeSet(BaseModel):
    words: set[str] = Field(max_length=4)


class WithFrozenSet(BaseModel):
    numbers: frozenset[Annotated[int, Field(ge=0, le=5)]]


class WithTuple(BaseModel):
    point: tuple[float, float]
    row: tuple[int, str, bool]
    many: tuple[int, ...]


class WithUUID(BaseModel):
    id: UUID4
    other: UUID


class WithPath(BaseModel):
    where: Path


class WithBytes(BaseModel):
    raw: bytes = Field(max_length=8)


class WithSecret(BaseModel):
    password: SecretStr


class WithAddresses(BaseModel):
    v4: IPv4Address
    v6: IPv6Address


class WithNetwork(BaseModel):
    net: IPv4Network


class WithBase64(BaseModel):
    text: Base64Str
    raw: Base64Bytes


class WithDecimal(BaseModel):
    price: Decimal
    rounded: Decimal = Field(max_digits=6, decimal_places=2, ge=0)


class WithDelta(BaseModel):
    lasts: timedelta


class WithTimes(BaseModel):
    at: datetime
    day: date
    clock: time


class WithAwareTimes(BaseModel):
    aware: AwareDatetime


class WithEmail(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"mail": "a@example.com"}]})
    mail: Annotated[str, Field(pattern=r"^[a-z]{1,8}@example\.com$", json_schema_extra={"format": "email"})]


class WithUrl(BaseModel):
    any: AnyUrl
    web: HttpUrl


class WithConstraints(BaseModel):
    short: constr(min_length=2, max_length=5)  # type: ignore[valid-type]
    code: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}-\d{2}$")]
    few: conlist(int, min_length=1, max_length=3)  # type: ignore[valid-type]
    digit: conint(ge=0, lt=10)  # type: ignore[valid-type]
    even: int = Field(multiple_of=2)


class WithSigns(BaseModel):
    count: PositiveInt
    rest: NonNegativeInt
    share: PositiveFloat


class WithStrict(BaseModel):
    number: StrictInt
    flag: StrictBool


class WithByteSize(BaseModel):
    size: ByteSize


class WithLiteral(BaseModel):
    unit: Literal["celsius", "fahrenheit"]
    version: Literal[1, 2, 3]
    mixed: Literal["a", 1, True, None]


class WithEnum(BaseModel):
    colour: Colour
    level: Level = Level.LOW


class Node(BaseModel):
    value: int
    children: list[Node] = Field(default=[], max_length=2)


class Linked(BaseModel):
    value: bool
    next: Linked | None = None


class Folder(BaseModel):
    name: str
    entries: list[Folder | File] = Field(max_length=2)


class File(BaseModel):
    name: str
    size: int


class Page(BaseModel, Generic[T]):
    items: list[T] = Field(max_length=3)
    next: int | None


class WithGeneric(BaseModel):
    people: Page[Person]
    words: Page[str]


class WithMap(BaseModel):
    counts: dict[str, int] = Field(max_length=3)


class WithMapOfModels(BaseModel):
    people: dict[str, Person] = Field(max_length=2)


class WithMapByEnum(BaseModel):
    by_colour: dict[Colour, float]


class WithMapByLiteral(BaseModel):
    sizes: dict[Literal["small", "large"], int]


class WithMapByPattern(BaseModel):
    by_code: dict[Annotated[str, StringConstraints(pattern="^[a-z]{2}$")], bool] = Field(max_length=3)


class WithMapByInt(BaseModel):
    by_id: dict[int, str] = Field(max_length=2)


class WithMapByDate(BaseModel):
    by_day: dict[date, int] = Field(max_length=2)


class WithBareContainers(BaseModel):
    anything: list[Any] = Field(max_length=2)
    mapping: dict[str, Any] = Field(max_length=2)


class WithJson(BaseModel):
    payload: Json[Any]
    numbers: Json[list[int]]


class WithAliases(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    first_name: str = Field(alias="firstName")
    class_: str = Field(alias="class", default="none")


class WithDefaults(BaseModel):
    limit: int = 10
    tags: list[str] = Field(default_factory=list, max_length=2)
    who: Person = Person(name="Ada", age=36)


class WithComputed(BaseModel):
    width: int
    height: int

    @computed_field
    @property
    def area(self) -> int:
        return self.width * self.height


class Numbers(RootModel[list[int]]):
    pass


class Choice(RootModel[Cat | Dog]):
    pass


@dataclass
class PlainPoint:
    x: int
    y: int = 0


@checked_dataclass
class CheckedPoint:
    x: float
    label: str | None = None


class Movie(TypedDict):
    title: str
    year: int


class Partial(TypedDict, total=False):
    title: str
    seen: bool


class Position(NamedTuple):
    x: int
    y: int


class WithOtherKinds(BaseModel):
    plain: PlainPoint
    checked: CheckedPoint
    movie: Movie
    partial: Partial
    position: Position


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    inner: Person


class Open(BaseModel):
    model_config = ConfigDict(extra="allow", json_schema_extra={"maxProperties": 3})
    name: str


class Described(BaseModel):
    """A model with notes that constrain nothing."""

    model_config = ConfigDict(title="Described thing", json_schema_extra={"x-order": 1})
    name: str = Field(title="Name", description="What it is called.", examples=["a"], deprecated=True)
    key: str = Field(json_schema_extra={"widget": "textarea"})


class Animal(BaseModel):
    name: str


class Bird(Animal):
    can_fly: bool


class WithInheritance(BaseModel):
    bird: Bird
    animals: Sequence[Animal] = Field(max_length=2)


class WithNested(BaseModel):
    grid: list[list[Annotated[int, Field(ge=0, le=9)]]] = Field(max_length=2)
    table: dict[str, dict[str, list[int]]] = Field(max_length=1)


class WithAnyAndObject(BaseModel):
    any: Any
    thing: object


class Search(BaseModel):
    query: str
    kind: Literal["web", "images"] = "web"


class Calculate(BaseModel):
    expression: str


class Action(BaseModel):
    thought: str = Field(description="Why.")
    action: Search | Calculate


class Steps(BaseModel):
    steps: Annotated[list[Annotated[str, Len(1, 20)]], Len(1, 3)]
    final_answer: str


class Maybe(BaseModel, Generic[T]):
    result: T | None = None
    error: bool = False
    message: str | None = None


class WithConstraintsOfNumbers(BaseModel):
    percent: float = Field(gt=0, lt=100)
    step: float = Field(multiple_of=0.5)
    cents: int = Field(multiple_of=5, ge=0, le=100)


class Empty(BaseModel):
    pass


MODELS: dict[str, Any] = {
    model.__name__: model
    for model in (
        Person, WithOptional, WithUnion, Cat, WithDiscriminated, WithDiscriminatedList, WithCallableDiscriminator,
        WithSet, WithFreeSet, WithFrozenSet, WithTuple, WithUUID, WithPath, WithBytes, WithSecret, WithAddresses,
        WithNetwork, WithBase64, WithDecimal, WithDelta, WithTimes, WithAwareTimes, WithEmail,
        WithUrl, WithConstraints, WithSigns, WithStrict, WithByteSize, WithLiteral, WithEnum, Node, Linked, Folder,
        WithGeneric, WithMap, WithMapOfModels, WithMapByEnum, WithMapByLiteral, WithMapByPattern, WithMapByInt,
        WithMapByDate, WithBareContainers, WithJson, WithAliases, WithDefaults, WithComputed, Numbers, Choice,
        PlainPoint, CheckedPoint, Movie, Partial, Position, WithOtherKinds, Closed, Open, Described, WithInheritance,
        WithNested, WithAnyAndObject, Action, Steps, WithConstraintsOfNumbers, Empty,
    )
} | {"Page_Person": Page[Person], "Maybe_Person": Maybe[Person]}  # fmt: skip


INSTANCES: dict[str, Any] = {
    "Person": {"name": "Ada", "age": 36},
    "WithOptional": {"nickname": None, "born": "1815-12-10", "score": 0.5},
    "WithUnion": {"value": True, "many": [1, "a"]},
    "Cat": {"kind": "cat", "lives": 9},
    "WithDiscriminated": {"pet": {"kind": "dog", "is_good": False}},
    "WithDiscriminatedList": {"pets": [{"kind": "cat", "lives": 1}, {"kind": "dog"}]},
    "WithCallableDiscriminator": {"pet": {"kind": "cat", "lives": 3}},
    "WithSet": {"colours": ["green", "red"], "flags": [True]},
    "WithFreeSet": {"words": ["a", "b"]},
    "WithFrozenSet": {"numbers": [5, 0, 3]},
    "WithTuple": {"point": [0.5, -1], "row": [1, "a", False], "many": []},
    "WithUUID": {"id": "7f9c24e8-3b12-4a5f-9b1a-0123456789ab", "other": "00000000-0000-0000-0000-000000000000"},
    "WithPath": {"where": "/tmp/a b.txt"},
    "WithBytes": {"raw": "abc"},
    "WithSecret": {"password": "hunter2"},
    "WithAddresses": {"v4": "127.0.0.1", "v6": "::1"},
    "WithNetwork": {"net": "10.0.0.0/8"},
    "WithBase64": {"text": "YWJj", "raw": "YQ=="},
    "WithDecimal": {"price": 1.5, "rounded": 0.25},
    "WithDelta": {"lasts": "P1DT2H"},
    "WithTimes": {"at": "2026-11-23T01:02:03Z", "day": "2026-11-23", "clock": "01:02:03Z"},
    "WithAwareTimes": {"aware": "2026-11-23T01:02:03+01:00"},
    "WithEmail": {"mail": "a@example.com"},
    "WithUrl": {"any": "ftp://a.example/x", "web": "https://a.example/"},
    "WithConstraints": {"short": "abc", "code": "ABC-12", "few": [1], "digit": 9, "even": 4},
    "WithSigns": {"count": 1, "rest": 0, "share": 0.5},
    "WithStrict": {"number": 5, "flag": False},
    "WithByteSize": {"size": 1024},
    "WithLiteral": {"unit": "celsius", "version": 3, "mixed": None},
    "WithEnum": {"colour": "red", "level": 2},
    "Node": {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3}]},
    "Linked": {"value": True, "next": {"value": False, "next": None}},
    "Folder": {"name": "a", "entries": [{"name": "b", "entries": []}, {"name": "c", "size": 5}]},
    "WithGeneric": {"people": {"items": [{"name": "a", "age": 1}], "next": None}, "words": {"items": [], "next": 2}},
    "WithMap": {"counts": {"a": 1, "b": 2}},
    "WithMapOfModels": {"people": {"x": {"name": "a", "age": 1}}},
    "WithMapByEnum": {"by_colour": {"red": 0.5}},
    "WithMapByLiteral": {"sizes": {"large": 2}},
    "WithMapByPattern": {"by_code": {"de": True, "fr": False}},
    "WithMapByInt": {"by_id": {"1": "a"}},
    "WithMapByDate": {"by_day": {"2026-11-23": 5}},
    "WithBareContainers": {"anything": [None, {"a": [1]}], "mapping": {"a": "b"}},
    "WithJson": {"payload": "{\"a\": 1}", "numbers": "[1, 2]"},
    "WithAliases": {"firstName": "Ada", "class": "x"},
    "WithDefaults": {"limit": 5, "tags": ["a"], "who": {"name": "Bo", "age": 1}},
    "WithComputed": {"width": 2, "height": 3},
    "Numbers": [1, 2, 3],
    "Choice": {"kind": "dog", "is_good": True},
    "PlainPoint": {"x": 1, "y": 2},
    "CheckedPoint": {"x": 0.5, "label": None},
    "Movie": {"title": "M", "year": 1931},
    "Partial": {"seen": True},
    "Position": [1, 2],
    "WithOtherKinds": {
        "plain": {"x": 1, "y": 0}, "checked": {"x": 1, "label": "a"}, "movie": {"title": "M", "year": 1931},
        "partial": {}, "position": [3, 4],
    },
    "Closed": {"name": "a", "inner": {"name": "b", "age": 1}},
    "Open": {"name": "a", "more": [1], "other": None},
    "Described": {"name": "a", "key": "b"},
    "WithInheritance": {"bird": {"name": "a", "can_fly": True}, "animals": [{"name": "b"}]},
    "WithNested": {"grid": [[1, 2], []], "table": {"a": {"b": [1]}}},
    "WithAnyAndObject": {"any": [1], "thing": {"a": None}},
    "Action": {"thought": "a", "action": {"expression": "1 + 1"}},
    "Steps": {"steps": ["a", "b"], "final_answer": "c"},
    "WithConstraintsOfNumbers": {"percent": 99.5, "step": 1.5, "cents": 15},
    "Empty": {},
    "Page_Person": {"items": [{"name": "a", "age": 1}], "next": 3},
    "Maybe_Person": {"result": None, "error": True, "message": "none"},
}  # fmt: skip
"""A value of each model."""

NOT_TOLD = {
    "WithDecimal": "its schema allows any string, the model only numbers",
    "WithJson": "its schema allows any string, the model only JSON",
    "WithMapByInt": "its schema allows any key, the model only numbers",
    "WithBytes": "its schema counts characters, the model bytes",
    "WithBase64": "its schema allows any bytes, the model only UTF-8",
    "WithMapByPattern": "its schema says nothing of keys that do not match, the model refuses them",
    "WithByteSize": "its schema has ECMA 262's white space, the model Python's",
}
"""The models that refuse values that their own schema allows, and why."""
