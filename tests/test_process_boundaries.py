"""Values that go to another process arrive as they were sent, types included: 20 is not 20.0, a tuple is not a list.

The messages are found in the source: whatever is decoded there from msgpack. Their values are generated from the
declared types, each field in turn, so a new message or field is tested without being listed here.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect
from real_app import RealThreadedApp, write_model

import tureen
from tureen.contract.types import FromEngine, ToEngine
from tureen.serving.inproc import ThreadHost

ROOT = Path(tureen.__file__).parent
MOST_NESTED = 2
"""How often a struct may be inside another one of its own type."""

INTS = (0, 1, -1, 20, 2**31, 2**53 + 1, 2**63 - 1, -(2**63))
FLOATS = (0.5, 1.0, 20.0, 0.0, -0.0, -1.5, 1e308, math.inf, -math.inf, math.nan)
TEXTS = ("a", "", "é\0😀", "1", "x" * 40, "tcp://a:1")
BLOBS = (b"a", b"", b"\0\xff" * 20)
PLAIN = (None, True, 1, 1.0, 2**63 - 1, -0.0, "é", [], [1, [True, 1.0, None]], {}, {"a": {"b": [1.0, 1, False]}})


class Boundary(NamedTuple):
    """A place where a value of `kind` arrives, and the function that decodes it there."""

    place: str
    kind: Any
    function: str

    def carry(self, value: Any) -> Any:
        """Return the value as it arrives."""
        if self.function == "msgspec.convert":  # after msgpack without a type
            sent = msgspec.msgpack.encode(msgspec.to_builtins(value))
            return msgspec.convert(msgspec.msgpack.decode(sent), self.kind)
        coder = msgspec.json if "json" in self.function else msgspec.msgpack
        return coder.decode(coder.encode(value), type=self.kind)


@cache
def modules() -> dict[str, str]:
    """Return the source of each module by its name."""
    paths = sorted(ROOT.rglob("*.py"))
    return {".".join(("tureen", *path.relative_to(ROOT).with_suffix("").parts)): path.read_text() for path in paths}


@cache
def boundaries() -> list[Boundary]:
    """Find every typed decoder of msgpack in the source, every conversion of plain values between front processes, and
    every header of weights that processes share."""
    return [
        Boundary(f"{module}: {ast.unparse(node)}", kind_of(node, module), ast.unparse(call.func))
        for module, text in modules().items()
        if "msgspec" in text
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and (node := type_of(call, module))
    ]


def type_of(call: ast.Call, module: str) -> ast.expr | None:
    """Return the type that a call decodes at a boundary; None for every other call."""
    match ast.unparse(call.func):
        case "msgspec.msgpack.Decoder":
            return call.args[0]
        case "msgspec.convert" if module.startswith("tureen.api_workers."):
            return call.args[1]
        case "msgspec.msgpack.decode":
            pass
        case "msgspec.json.decode" if module.startswith("tureen.runner."):
            pass
        case _:
            return None
    [keyword] = call.keywords
    assert keyword.arg == "type"
    return keyword.value


def kind_of(node: ast.expr, module: str) -> Any:
    return eval(ast.unparse(node), vars(importlib.import_module(module)))  # noqa: S307 (our own source)


def values_of(kind: inspect.Type, outer: tuple[type, ...] = ()) -> Iterator[Any]:
    """Yield values of a type inside these structs, the plainest first. Raises KeyError for a type without a maker."""
    yield from MAKERS[type(kind)](kind, outer)


def of_union(kind: inspect.UnionType, outer: tuple[type, ...]) -> Iterator[Any]:
    for one in sorted(kind.types, key=lambda one: not isinstance(one, inspect.NoneType)):
        yield from values_of(one, outer)


def numbers_of(kind: inspect.IntType | inspect.FloatType, _: tuple[type, ...]) -> Iterator[Any]:
    """Yield the numbers that a type's bounds allow, and the bounds."""
    number_type, numbers = (float, FLOATS) if isinstance(kind, inspect.FloatType) else (int, INTS)
    bounds = [number_type(bound) for bound in (kind.ge, kind.le) if bound is not None]
    for number in (*bounds, *numbers):
        above = (kind.ge is None or number >= kind.ge) and (kind.gt is None or number > kind.gt)
        if above and (kind.le is None or number <= kind.le) and (kind.lt is None or number < kind.lt):
            yield number


def texts_of(kind: inspect.StrType, _: tuple[type, ...]) -> list[str]:
    texts = [text for text in TEXTS if kind.pattern is None or re.search(kind.pattern, text)]
    assert texts, f"add a text to TEXTS that {kind.pattern} matches"
    return [text for text in texts if fits(len(text), kind)]


def fits(length: int, kind: Any) -> bool:
    return (kind.min_length or 0) <= length and (kind.max_length is None or length <= kind.max_length)


def lists_of(kind: inspect.ListType | inspect.VarTupleType, outer: tuple[type, ...]) -> Iterator[Any]:
    items = list(values_of(kind.item_type, outer))
    lists = [[items[0]], [], [*items[:3], *items[-1:]], *([item] for item in items[1:])] if items else [[]]
    make = tuple if isinstance(kind, inspect.VarTupleType) else list
    yield from (make(some) for some in lists if fits(len(some), kind))


def tuples_of(kind: inspect.TupleType, outer: tuple[type, ...]) -> Iterator[Any]:
    yield from map(tuple, in_turn([list(values_of(one, outer)) for one in kind.item_types]))


def named_tuples_of(kind: inspect.NamedTupleType, outer: tuple[type, ...]) -> Iterator[Any]:
    yield from (kind.cls(*items) for items in in_turn([list(values_of(one.type, outer)) for one in kind.fields]))


def maps_of(kind: inspect.DictType, outer: tuple[type, ...]) -> Iterator[dict[Any, Any]]:
    """Yield maps. One from names to numbers holds numbers of different kinds: Python lets an int be in dict[str,
    float], and it must come out as an int."""
    keys, values = list(values_of(kind.key_type, outer)), list(values_of(kind.value_type, outer))
    if isinstance(kind.key_type, inspect.StrType) and isinstance(kind.value_type, inspect.FloatType):
        values += INTS
    yield {keys[0]: values[0]} if values else {}
    if fits(0, kind):
        yield {}
    yield from ({key: values[0]} for key in keys[1:] if values)
    yield from ({keys[0]: value} for value in values[1:])


def structs_of(kind: inspect.StructType, outer: tuple[type, ...]) -> Iterator[Any]:
    if outer.count(kind.cls) >= MOST_NESTED:
        return
    outer = (*outer, kind.cls)
    required = {field.name: next(values_of(field.type, outer)) for field in kind.fields if field.required}
    yield kind.cls(**required)
    for field in kind.fields:
        for value in values_of(field.type, outer):
            yield kind.cls(**required | {field.name: value})


def in_turn(choices: list[list[Any]]) -> Iterator[list[Any]]:
    """Yield one of each list: the first of all, then every other one beside the first of the others."""
    first = [some[0] for some in choices]
    yield first
    for index, some in enumerate(choices):
        yield from ([*first[:index], value, *first[index + 1 :]] for value in some[1:])


MAKERS: dict[type[inspect.Type], Callable[[Any, tuple[type, ...]], Iterable[Any]]] = {
    inspect.Metadata: lambda kind, outer: values_of(kind.type, outer),
    inspect.UnionType: of_union,
    inspect.NoneType: lambda *_: (None,),
    inspect.BoolType: lambda *_: (False, True),
    inspect.IntType: numbers_of,
    inspect.FloatType: numbers_of,
    inspect.StrType: texts_of,
    inspect.BytesType: lambda *_: BLOBS,
    inspect.AnyType: lambda *_: PLAIN,
    inspect.LiteralType: lambda kind, _: kind.values,
    inspect.ListType: lists_of,
    inspect.VarTupleType: lists_of,
    inspect.TupleType: tuples_of,
    inspect.NamedTupleType: named_tuples_of,
    inspect.DictType: maps_of,
    inspect.StructType: structs_of,
}


def difference(sent: Any, received: Any, path: str = "$") -> str | None:
    """Return where two values differ, in a type or in a number; None if they are the same."""
    if type(sent) is not type(received):
        return f"{path}: {sent!r:.60} arrived as {received!r:.60}"
    if isinstance(sent, float):
        is_same = struct.pack("d", sent) == struct.pack("d", received)
        return None if is_same else f"{path}: {sent} arrived as {received}"
    if isinstance(sent, msgspec.Struct):
        parts = [(f"{path}.{name}", getattr(sent, name), getattr(received, name)) for name in sent.__struct_fields__]
    elif isinstance(sent, dict) and sent.keys() == received.keys():
        kept = {key: key for key in received}
        parts = [(f"{path}[{key!r}]", (key, value), (kept[key], received[key])) for key, value in sent.items()]
    elif isinstance(sent, list | tuple) and len(sent) == len(received):
        parts = [(f"{path}[{at}]", *pair) for at, pair in enumerate(zip(sent, received, strict=True))]
    else:
        return None if sent == received else f"{path}: {sent!r:.60} arrived as {received!r:.60}"
    return next(filter(None, (difference(one, other, where) for where, one, other in parts)), None)


def test_msgpack_has_no_other_name_by_which_its_decoders_would_not_be_found():
    alias = re.compile(
        r"= msgspec\.msgpack$|from msgspec import .*msgpack|from msgspec\.msgpack|import msgspec as", re.M
    )
    assert [name for name, text in modules().items() if alias.search(text)] == ["tureen.recordings.delta_log"]


KINDS = {(str(boundary.kind), boundary.function == "msgspec.convert"): boundary for boundary in boundaries()}


@pytest.mark.parametrize("boundary", KINDS.values(), ids=lambda boundary: boundary.place)
def test_every_field_arrives_in_another_process_as_it_was_sent(boundary):
    num_values = 0
    for value in values_of(inspect.type_info(boundary.kind)):
        assert (why := difference(value, boundary.carry(value))) is None, why
        num_values += 1
    assert num_values


RECOMMENDED = {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05}


def send_as_to_a_process(monkeypatch) -> list[str]:
    """Send all that passes between a server and its engine through msgpack; returns the list of what that changes."""
    changes: list[str] = []

    def through(method, kind):
        boundary = Boundary("", kind, "msgspec.msgpack.decode")

        def send(host, message):
            received = boundary.carry(message)
            if why := difference(message, received, type(message).__name__):
                changes.append(why)
            method(host, received)

        return send

    monkeypatch.setattr(ThreadHost, "send", through(ThreadHost.send, ToEngine))
    monkeypatch.setattr(ThreadHost, "_publish", through(ThreadHost._publish, FromEngine))
    return changes


def test_a_model_that_recommends_top_k_is_served_the_same_from_another_process(tmp_path, monkeypatch):
    write_model(tmp_path, seed=1)
    (tmp_path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    changes = send_as_to_a_process(monkeypatch)
    everything = {"explain": True, "return_effective": True, "logprobs": 2, "n": 2, "logit_bias": {"5": 1}, "stop": "a"}
    with RealThreadedApp(tmp_path) as app:
        _, of_model = app.state.context.defaults
        assert (why := difference(RECOMMENDED, of_model)) is None, why
        answer = app.post("/v1/completions", prompt="ab", max_tokens=4, seed=1, **everything)
        assert answer.json()["choices"][0]["effective"]["top_k"] == {"value": 20, "from": "model"}
        assert '"stage":"top_k","value":20,' in answer.text
        params = {"max_new_tokens": 4, "custom_params": {"ngram_size": 2, "more": [1, 1.0, True, {"a": None}]}}
        hidden = {"return_logprob": True, "logprob_start_len": 0, "return_hidden_states": True}
        asked = {"text": "ab", "sampling_params": params, "custom_logit_processor": "no_repeat_ngram", **hidden}
        assert app.post("/generate", **asked).status_code == 200
    assert changes == []
