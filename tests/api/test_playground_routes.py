"""The playground's routes: browsers get the page at `/`, other clients what they always got."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from app_under_test import App

from tureen.app.playground import files

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MOST_BYTES = 300_000


class Loaded(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_browser_gets_the_page_and_a_client_of_ollama_s_api_its_line(app: App):
    page = app.request("GET", "/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<main" in page.text
    for accept in ("*/*", "application/json", ""):
        assert app.request("GET", "/", headers={"accept": accept}).text == "Ollama is running"
    told = app.request("POST", "/", json={"inputs": "a", "parameters": {"max_new_tokens": 1}}, headers=BROWSER)
    assert told.status_code == 200
    assert "generated_text" in told.text


def test_a_browser_needs_no_key_for_the_page_and_others_need_one_as_before():
    with App(api_key="s3cret") as app:
        assert app.request("GET", "/", headers=BROWSER).status_code == 200
        assert app.request("GET", "/playground/app.js").status_code == 200
        assert app.request("GET", "/").status_code == 401


def test_the_page_has_no_script_or_style_inside_and_its_policy_allows_none(app: App):
    page = app.request("GET", "/", headers=BROWSER)
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= set(
        policy.split("; ")
    )
    for tag, attributes in Loaded(page.text).found:
        assert tag != "style"
        assert tag != "script" or attributes["src"]
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for name in ("src", "href"):
            assert not re.match(r"\w+:|//", attributes.get(name) or "")


def test_every_module_that_is_imported_is_there(app: App):
    assert {"index.html", "app.js", "style.css", "vendor/purify.min.js"} <= files()
    for name in files():
        if name.endswith(".js") and not name.startswith("vendor/"):
            text = app.request("GET", f"/playground/{name}").text
            assert {
                path.removeprefix("./") for path in re.findall(r'^import .*?"(.+?)";', text, re.MULTILINE)
            } <= files()


def test_a_browser_that_has_a_file_is_told_so(app: App):
    first = app.request("GET", "/playground/style.css")
    again = app.request("GET", "/playground/style.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["", "../app.py", "vendor/../../page.py", "vendor/README.md", "%2e%2e/app.py", "x.js"])
def test_nothing_but_its_files_is_served(app: App, name: str):
    assert app.request("GET", f"/playground/{name}").status_code == 404


def test_the_playground_loads_in_few_bytes(app: App):
    """Count what a browser reads to show it: the page, all its files, and the document that has the parameters."""
    names = ["openapi.json", "v1/models", *(f"playground/{name}" for name in files())]
    answers = [app.request("GET", f"/{name}", headers=BROWSER | {"accept-encoding": "gzip"}) for name in ["", *names]]
    assert {answer.status_code for answer in answers} == {200}
    assert sum(int(answer.headers["content-length"]) for answer in answers) < MOST_BYTES
    plain = app.request("GET", "/playground/app.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text == app.request("GET", "/playground/app.js", headers={"accept-encoding": "gzip"}).text


def test_files_are_compressed_for_those_who_take_gzip(app: App):
    takes = {"gzip": True, "br, GZIP;q=0.5": True, "gzip; q=1.0": True, "gzip;q=0": False, "br, gzip; q=0.00": False}
    takes |= {"": False, "identity": False, "x-gzipped": False}
    for accepted, is_compressed in takes.items():
        for path in ("/openapi.json", "/playground/app.js"):
            answer = app.request("GET", path, headers={"accept-encoding": accepted})
            assert (accepted, answer.headers.get("content-encoding")) == (accepted, "gzip" if is_compressed else None)
            assert "accept-encoding" in answer.headers["vary"]


def test_each_page_links_all_pages_and_says_which_it_is(app: App):
    for path in ("", "status", "docs", "compat"):
        page = app.request("GET", f"/{path}", headers=BROWSER)
        (bar,) = re.findall(r'<nav class="pages".*?</nav>', page.text, re.DOTALL)
        links = [attributes for _, attributes in Loaded(bar).found if "href" in attributes]
        assert [attributes["href"] for attributes in links] == ["./", "status", "docs", "compat"]
        assert [attributes["href"] for attributes in links if "aria-current" in attributes] == [path or "./"]
        assert 'id="theme"' in page.text
        assert 'rel="icon"' in page.text
