"""What a user does in the playground, and what they then see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from timeouts import PATIENCE_S

DONE = "article.assistant[data-state={state}]"
ATTACH = """([name, bytes, type = ""]) => {
    const data = new DataTransfer();
    data.items.add(new File([new Uint8Array(bytes)], name, {type}));
    document.getElementById("main").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
}"""
"""Drops a file of a name, bytes and perhaps a type on the page."""


def say(page, text: str, *, wait: bool = True) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        page.wait_for_selector("#stop", state="hidden")


def answers(page) -> list[str]:
    return [text.strip() for text in page.locator("article.assistant .body").all_text_contents()]


def wait_state(page, state: str) -> None:
    page.wait_for_selector(DONE.format(state=state))


def set_fields(page, **values: object) -> None:
    """Sets sampling parameters in the form, which may be out of sight."""
    for name, value in values.items():
        page.evaluate(
            """([id, text]) => {
                const field = document.getElementById(id);
                field.value = text;
                field.dispatchEvent(new Event("input", {bubbles: true}));
            }""",
            [f"field-{name}", str(value).lower() if isinstance(value, bool) else str(value)],
        )


def constrain(page, kind: str, text: str) -> None:
    page.evaluate("() => { document.getElementById('constraint-kind').closest('details').open = true; }")
    page.select_option("#constraint-kind", kind)
    page.fill("#constraint-text", text)


def tokens(page) -> list[str]:
    return page.locator("article.assistant .token[role=option]").all_text_contents()


def chat_turns(*texts: str) -> list[dict[str, str]]:
    """The turns of a chat that the user begins."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def choose_token(page, place: int = 5) -> None:
    page.locator(".token[role=option]").nth(place).click()
    page.wait_for_selector(".explanation .stage")


@contextmanager
def opened(browser, url: str, *, width: int = 1280) -> Iterator[Any]:
    """Open a page in a browser context of its own. Nothing in it may fail."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="light")
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(url)
    yield page
    assert faults == []
    context.close()


RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def faults_of_accessibility(page, where: str = "html") -> list[str]:
    """Return the accessibility rules that an element of the page breaks, with the places."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(pytest.importorskip("axe_playwright_python.sync_playwright").Axe().axe_script)
    options = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
    found = page.evaluate("async ([where, options]) => (await axe.run(where, options)).violations", [where, options])
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary'][:300]}" for one in found for node in one["nodes"]
    ]


def faults_of_looks(page) -> dict[tuple[int, str], list[str]]:
    """Return the elements that are wider than the screen or break an accessibility rule, by width and colour scheme."""
    faults = {}
    for width, scheme in ((400, "dark"), (1280, "light")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        too_wide = page.evaluate("document.documentElement.scrollWidth") > width
        faults[width, scheme] = ["too wide"] * too_wide + faults_of_accessibility(page)
    return {look: found for look, found in faults.items() if found}
