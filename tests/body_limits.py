"""The bodies of all routes, and the lists and maps in them: for tests of their limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from app_under_test import App
from declared_limits import Place, places_of, sample
from msgspec import inspect

from tureen.app.compat import compat_routes
from tureen.app.generate import prompt_fields
from tureen.config import MAX_N, MAX_PROMPTS, MAX_STOPS
from tureen.dialects.openai.tokenize_routes import TokenizeBody
from tureen.http.dialect import Entry

LARGEST = 4 << 20
"""Bytes of a body."""

MORE = 10_000
"""Entries by which two lists differ. One more line of Python for each of them would be noticed."""

JSON = {"content-type": "application/json"}
PROMPTS = (*prompt_fields(), "prompt", "messages")
NOT_OFFERED = {part.struct: frozenset(part.table.refused) for spoken in compat_routes() for part in spoken.parts}


@contextmanager
def limited_app(batches: Path) -> Iterator[App]:
    most = {"max_batch_size": MAX_PROMPTS, "max_n": MAX_N, "max_stop_strings": MAX_STOPS}
    with App(chat_template="chatml", max_body_bytes=2 * LARGEST, **most, batch_path=str(batches)) as running:
        yield running


def bodies() -> list[Any]:
    with App(chat_template="chatml") as app:
        entries = [route for route in app.app.routes if isinstance(route, Entry) and route.docs and route.docs.bodies]
    found: dict[tuple[str, str], Any] = {}
    for entry in entries:
        for body in entry.docs.bodies:
            name = f"{entry.path} {body.__name__}"
            found.setdefault((body.__name__, entry.access), pytest.param(entry, body, id=name))
    return list(found.values())


BODIES = bodies()


def places(entry: Entry, body: type[msgspec.Struct]) -> Iterator[Place]:
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


def counts(place: Place) -> tuple[int, int]:
    """Return two numbers of entries above the limit, or fewer if the body would be too large."""
    assert place.most is not None
    fit = min(place.fit, LARGEST // (len(place.entry) + (10 if place.is_map else 1)))
    most = max(place.most, 1)
    small = min(10 * most, most + MORE, fit)
    large = min(small + MORE, fit)
    return (small, large) if small < large else (place.most + 1, large)
