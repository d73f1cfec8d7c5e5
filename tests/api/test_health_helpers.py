"""/health names helper processes that are being replaced, and is well again when they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from app_under_test import App


class Down:
    """In place of the supervisor of processes that are being replaced."""

    name = "the workers that compile"
    is_down = True

    def share(self, budget):
        pass


@pytest.fixture
def app():
    with App() as made:
        yield made


def test_health_is_empty_while_all_is_well(app):
    answer = app.request("GET", "/health")
    assert (answer.status_code, answer.text) == (200, "")


def test_health_names_what_the_front_is_replacing(app):
    app.state.helpers._checker = SimpleNamespace(supervisor=Down(), close=lambda: None, unverified=0)
    answer = app.request("GET", "/health")
    assert (answer.status_code, answer.text) == (200, "being replaced: the workers that compile\n")
    app.state.helpers._checker.supervisor.is_down = False
    assert app.request("GET", "/health").text == ""


def test_health_names_what_the_engine_is_replacing_also_while_it_is_idle(app, monkeypatch):
    monkeypatch.setattr("tureen.engine.grammars.Grammars.supervisor", Down())
    app.generate(text="a", sampling_params={"max_new_tokens": 1})
    assert app.request("GET", "/health").text == "being replaced: the workers that compile\n"
    monkeypatch.setattr(Down, "is_down", False)
    app.wait_until(lambda: not app.state.helpers_down)
    assert app.request("GET", "/health").text == ""
    monkeypatch.setattr(Down, "is_down", True)
    app.wait_until(lambda: app.state.helpers_down)
    assert app.request("GET", "/health").text == "being replaced: the workers that compile\n"


def test_health_asks_the_engine_nothing(app, monkeypatch):
    asked = []
    monkeypatch.setattr(app.client, "call", lambda *what: asked.append(what))
    assert [app.request("GET", "/health").status_code for _ in range(3)] == [200] * 3
    assert asked == []
