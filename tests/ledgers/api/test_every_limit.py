"""Refusing a list or a map of any body costs no more the longer it is, and no value is shown whole."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
import pytest
from app_under_test import App
from body_limits import BODIES, JSON, counts, limited_app, places
from declared_limits import Place, sample
from msgspec import inspect
from work import counted

from tureen.http.dialect import Entry

GUARDS = ("contract", "dialects", "app", "http", "requests")

SPARE = 1000
"""Calls and lines by which two refusals may differ."""

LONG = 100_000
"""Characters of a value that no error shows whole."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with limited_app(tmp_path_factory.mktemp("batches")) as running:
        yield running


@pytest.mark.parametrize(("entry", "body"), BODIES)
def test_no_depth_of_nesting_is_an_internal_error(app: App, entry: Entry, body: type[msgspec.Struct]):
    """What is read just so may be too deep for what looks at it later."""
    complaints = []
    for place in places(entry, body):
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
            assert response.status_code < 500 or response.status_code == 503, (
                response.text
            )  # no weights to exchange here
            if response.status_code != 200:
                assert len(response.content) < 2000, f"{field.encode_name}: {response.text[:3000]}"


@pytest.mark.parametrize(("entry", "body"), BODIES)
def test_refusing_a_long_list_costs_no_more_the_longer_it_is(app: App, entry: Entry, body: type[msgspec.Struct]):
    complaints = []
    for place in places(entry, body):
        small, large = counts(place)
        contents = {count: place.filled(count) for count in (place.most + 1, small, large)}
        responses = {place.most + 1: post(app, entry, contents[place.most + 1])}  # later ones find done what it does
        work = []
        for count in (small, large):
            with counted() as one:
                responses[count] = post(app, entry, contents[count])
            work.append(one.on_loop + one.elsewhere)
        complaints += [text for count, response in responses.items() if (text := complaint(place, count, response))]
        if work[1] - work[0] > SPARE:
            complaints.append(f"{place.path} of {place.entry!r}: {work} for {small} and {large} entries")
    assert not complaints, "\n".join(complaints)
    app.check_idle()


def post(app: App, entry: Entry, content: bytes) -> httpx.Response:
    return app.request("POST", entry.path, content=content, headers=JSON)


def complaint(place: Place, count: int, response: httpx.Response) -> str:
    """Return the fault in the refusal of `count` entries, or "" if it names the field, the count and the limit."""
    told = (place.field, str(count), str(place.most))
    is_vast = response.status_code == 413 and "keys, lists and objects" in response.text
    is_told = response.status_code in (400, 422) and all(word in response.text for word in told)
    if (is_vast or is_told) and len(response.content) < 2000:
        return ""
    return f"{place.path}, {count} of {place.entry!r}: {response.status_code} {response.text[:3000]}"
