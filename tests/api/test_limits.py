"""Every list and map of every body has a declared limit, and refusing what is longer costs no more the longer it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from app_under_test import App
from declared_limits import Place, places_of, sample
from msgspec import inspect
from work import counted

from tureen.config import MAX_N, MAX_PROMPTS, MAX_STOPS
from tureen.dialects.openai.tokenize_routes import TokenizeBody
from tureen.front.compat import compat_routes
from tureen.front.generate import prompt_fields
from tureen.http.dialect import Entry

LARGEST = 4 << 20
"""Bytes of a body. A list of which fewer than 1,000 times the limit fit into it is as long as fits."""

SPARE = 1000
"""Calls and lines by which two refusals may differ."""

LONG = 100_000
"""Characters of a value that no error shows whole."""

JSON = {"content-type": "application/json"}
PROMPTS = (*prompt_fields(), "prompt", "messages")
NOT_OFFERED = {part.struct: frozenset(part.table.refused) for spoken in compat_routes() for part in spoken.parts}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    most = {"max_batch_size": MAX_PROMPTS, "max_n": MAX_N, "max_stop_strings": MAX_STOPS}
    kept = {"batch_path": str(tmp_path_factory.mktemp("batches"))}
    with App(chat_template="chatml", max_body_bytes=2 * LARGEST, **most, **kept) as running:
        yield running


def _bodies() -> list[Any]:
    with App(chat_template="chatml") as app:
        entries = [route for route in app.app.routes if isinstance(route, Entry) and route.docs and route.docs.bodies]
    found: dict[tuple[str, str], Any] = {}
    for entry in entries:
        for body in entry.docs.bodies:
            name = f"{entry.path} {body.__name__}"
            found.setdefault((body.__name__, entry.access), pytest.param(entry, body, id=name))
    return list(found.values())


BODIES = _bodies()


def _places(entry: Entry, body: type[msgspec.Struct]) -> Iterator[Place]:
    example = dict(entry.docs.example or {})
    whole = example if body.__struct_fields__ and set(example) <= set(body.__struct_fields__) else {}
    whole = {**sample(inspect.type_info(body)), **whole}

    def put(fields: dict[str, Any]) -> dict[str, Any]:
        rest = whole
        if any(name in PROMPTS for name in fields):
            rest = {name: value for name, value in whole.items() if name not in PROMPTS}
        elif body is TokenizeBody and "tools" in fields:
            rest = {"messages": [{"role": "user", "content": "a"}]}
        return {**rest, **fields}

    yield from places_of(body, put, NOT_OFFERED.get(body, frozenset()))


def _counts(place: Place) -> tuple[int, int]:
    """10 and 1,000 times the limit, where so many fit into a body."""
    assert place.most is not None
    fit = min(place.fit, LARGEST // (len(place.entry) + (10 if place.is_map else 1)))
    most = max(place.most, 1)
    small, large = min(10 * most, fit), min(1000 * most, fit)
    return (small, large) if small < large else (place.most + 1, large)


@pytest.mark.parametrize(("entry", "body"), BODIES)
def test_every_list_and_map_says_how_many_entries_it_takes(entry: Entry, body: type[msgspec.Struct]):
    assert [place.path for place in _places(entry, body) if place.most is None] == []


@pytest.mark.parametrize(("entry", "body"), BODIES)
def test_no_depth_of_nesting_is_an_internal_error(app: App, entry: Entry, body: type[msgspec.Struct]):
    """What is read just so may be too deep for what looks at it later."""
    complaints = []
    for place in _places(entry, body):
        if place.is_map and place.entry == b"1" and "." not in place.path:
            for depth in (100, *range(920, 1000, 5)):
                nested = msgspec.Raw(b'{"a":' * depth + b"1" + b"}" * depth)
                response = app.request("POST", entry.path, content=msgspec.json.encode(place.put(nested)), headers=JSON)
                if response.status_code >= 500:
                    complaints.append(f"{place.path}, {depth} deep: {response.text}")
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("entry", "body"), BODIES)
def test_no_value_is_told_back_at_length(app: App, entry: Entry, body: type[msgspec.Struct]):
    long = "x" * LONG
    example = {**sample(inspect.type_info(body)), **(entry.docs.example or {})}
    for field in msgspec.structs.fields(body):
        for value in (long, {long: 1}, [long], [[long]], {"type": long}, int("9" * 4000)):
            content = msgspec.json.encode(example | {field.encode_name: value})
            response = app.request("POST", entry.path, content=content, headers=JSON)
            assert response.status_code < 500, response.text
            if response.status_code != 200:
                assert len(response.content) < 2000, f"{field.encode_name}: {response.text[:3000]}"


@pytest.mark.parametrize(("entry", "body"), BODIES)
def test_refusing_a_long_list_costs_no_more_the_longer_it_is(app: App, entry: Entry, body: type[msgspec.Struct]):
    complaints = []
    for place in _places(entry, body):
        work = []
        small, large = _counts(place)
        for count in (place.most + 1, small, large):  # what the first one does, others find done
            content = place.filled(count)
            with counted() as one:
                response = app.request("POST", entry.path, content=content, headers=JSON)
            work.append(one.on_loop + one.elsewhere)
            told = (place.field, str(count), str(place.most))
            if response.status_code not in (400, 422) or not all(word in response.text for word in told):
                complaints.append(f"{place.path}, {count} of {place.entry!r}: {response.status_code} {response.text}")
            assert len(response.content) < 2000
        if work[2] - work[1] > SPARE:
            complaints.append(f"{place.path} of {place.entry!r}: {work} for {small} and {large} entries")
    assert not complaints, "\n".join(complaints)
    app.check_idle()
