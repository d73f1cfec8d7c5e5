"""Pages of other sites call the server from a browser where the operator allows their origin, and nowhere else."""

from __future__ import annotations

import re
import shutil

import pytest
from app_under_test import App

from tureen.errors import StartupError
from tureen.http.origins import check_origins

CHAT, OTHER = "https://chat.example.org", "https://other.example.org"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
BODY = {"text": "Hi", "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def app():
    with App(allowed_origins=(CHAT,)) as running:
        yield running


def preflight(app: App, origin: str, path: str = "/generate"):
    return app.request("OPTIONS", path, headers={"origin": origin} | PREFLIGHT)


def test_a_preflight_of_an_allowed_page_is_granted_with_method_and_headers(app):
    answer = preflight(app, CHAT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == CHAT
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(
        re.split(r",\s*", answer.headers["access-control-allow-headers"].lower())
    )
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origin", [OTHER, f"{CHAT}.evil.example", "null", "http://chat.example.org"])
def test_a_preflight_of_any_other_page_is_refused(app, origin):
    answer = preflight(app, origin)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_an_allowed_page_may_read_answers_refusals_and_headers(app):
    for body, status in ((BODY, 200), (BODY | {"txet": "Hi"}, 400)):
        answer = app.request("POST", "/generate", json=body, headers={"origin": CHAT})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == CHAT
        assert "x-tureen-ignored" in answer.headers["access-control-expose-headers"]
        assert "origin" in answer.headers["vary"].lower()


def test_without_the_setting_no_answer_says_anything_of_origins():
    with App() as app:
        refusal = preflight(app, CHAT)
        assert refusal.status_code == 403
        answer = app.request("POST", "/generate", json=BODY, headers={"origin": CHAT})
        for headers in (refusal.headers, answer.headers):
            assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [(CHAT,), ("*",)])
def test_an_allowed_page_needs_a_key_where_one_is_needed_and_administers_nothing_without(origins):
    with App(allowed_origins=origins, api_key="k3y") as app:
        assert app.request("POST", "/generate", json=BODY, headers={"origin": CHAT}).status_code == 401
        key = {"origin": CHAT, "authorization": "Bearer k3y"}
        assert app.request("POST", "/generate", json=BODY, headers=key).status_code == 200
    with App(allowed_origins=origins) as app:
        assert app.request("POST", "/generate", json=BODY, headers={"origin": CHAT}).status_code == 200
        assert app.request("POST", "/flush_cache", headers={"origin": CHAT}).status_code == 403


def test_an_allowed_page_may_send_a_file_as_a_form_and_another_may_not(app):
    form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    assert app.request("POST", "/v1/files", headers={"origin": OTHER}, **form).status_code == 403
    assert app.request("POST", "/v1/files", headers={"origin": CHAT}, **form).status_code != 403


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        ("https://chat.example.org/", "did you mean https://chat.example.org?"),
        ("HTTPS://Chat.example.org", "did you mean https://chat.example.org?"),
        ("https://chat.example.org:443", "did you mean https://chat.example.org?"),
        ("http://localhost:80", "did you mean http://localhost?"),
        ("chat.example.org", "such as https://chat.example.org"),
        ("https://*.example.org", "must be * or an origin"),
        ("", "must be * or an origin"),
    ],
)
def test_what_no_browser_sends_as_an_origin_is_refused_at_the_start(origin, hint):
    with pytest.raises(StartupError, match=re.escape(hint)):
        check_origins((CHAT, origin))


@pytest.mark.parametrize("origin", ["*", CHAT, "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md"])
def test_origins_that_browsers_send_are_taken(origin):
    check_origins((origin,))
