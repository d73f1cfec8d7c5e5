"""The documentation as a site: it builds without a network, leads nowhere that is not there, and asks no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GUARDS = ("docs/*.md", "docs/decisions/*.md")
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src")}


class Page(HTMLParser):
    """What a page refers to, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif (tag, name) in LOADED and value and ("rel", "canonical") not in attrs:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | NO_NETWORK, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_of_docs_is_in_it_and_in_its_menu(pages, site):
    names = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    html = {path.relative_to(site).with_suffix("") for path in pages}
    assert {name.with_name("index") if name.name == "README" else name for name in names} <= html
    menu = re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(menu)


def test_every_link_leads_to_a_page_and_a_place_that_exist(pages):
    missing = []
    for path, page in pages.items():
        for link in page.links:
            target, place = urldefrag(link)
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            if not file.exists() or (place and file in pages and unquote(place) not in pages[file].places):
                missing.append((path.name, link))
    assert missing == []


def test_a_page_loads_nothing_from_another_host(pages):
    elsewhere = {address for page in pages.values() for address in page.loaded if re.match(r"(\w+:)?//", address)}
    assert elsewhere == set()


def test_a_link_in_code_stays_and_one_to_a_file_of_the_repository_is_its_name(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from site_hooks import relinked

    text = "[p](openai.md#a) [`t`](../tests/x.py) [r](../README.md) `[c](../x)` [w](https://a.b/c)\n```\n[d](../y)\n```"
    shown = "[p](openai.md#a) `t` (`tests/x.py`) [r](index.md) `[c](../x)` [w](https://a.b/c)\n```\n[d](../y)\n```"
    assert relinked(text, "docs") == shown
