"""A body for a route of the whole application, over a fake engine: an answer or a refusal, never an internal error."""

from __future__ import annotations

import contextlib
import functools

from app_under_test import App

HELD = contextlib.ExitStack()
"""What lives until all that is fuzzed here is."""

HEADERS = {"content-type": "application/json"}


@functools.cache
def app() -> App:
    return HELD.enter_context(App(context_length=64, chat_template="chatml"))


@functools.cache
def paths() -> tuple[str, ...]:
    """Where users send bodies."""
    entries = [entry for entry in app().app.routes if getattr(entry, "docs", None) and entry.docs.bodies]
    return tuple(sorted(entry.path for entry in entries if entry.access == "user"))


def run(data: bytes) -> None:
    """The first line names a route; one that is none counts as the sum of its bytes."""
    line, _, body = data.partition(b"\n")
    name = line.decode("latin-1")
    path = name if name in paths() else paths()[sum(line) % len(paths())]
    answer = app().request("POST", path, content=body, headers=HEADERS)
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    assert b'"internal_error"' not in answer.content
    app().check_idle()
