"""/compat and /docs on a phone and at a desk: folded, searchable, readable; what is tried shows its text."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from app_under_test import LiveServer
from driving import faults_of_looks, opened
from timeouts import PATIENCE_S


@pytest.fixture(scope="module")
def server(browser) -> Iterator[LiveServer]:
    with LiveServer(chat_template="chatml") as running:
        yield running


def test_they_are_folded_searchable_and_no_wider_than_a_screen(browser, server):
    for path in ("compat", "docs"):
        is_folded_searchable_and_no_wider_than_a_screen(browser, server, path)


def is_folded_searchable_and_no_wider_than_a_screen(browser, server, path):
    with opened(browser, f"{server.url}/{path}") as page:
        page.wait_for_selector("main details")
        for width in (400, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollHeight") < 4000
        page.locator("#find").fill("temperature")
        page.get_by_text(" found", exact=False).first.wait_for()
        assert faults_of_looks(page) == {}
        page.locator("#find").fill("zebra crossing")
        page.get_by_text("No ").get_by_text("“zebra crossing”").wait_for()
        assert page.locator("main > details:visible").count() == 0
        page.locator("#find").fill("")
        assert page.locator("main > details:visible").count() > 5
        assert page.locator("main > details[open]").count() == 0


def test_a_streamed_chat_that_is_tried_shows_its_text_and_code_is_shown_as_code(browser, server):
    with opened(browser, f"{server.url}/docs#post_v1_chat_completions", width=400) as page:
        chat = page.locator("#post_v1_chat_completions")
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 12, "temperature": 0, "seed": 7}
        chat.get_by_label("body", exact=True).fill(json.dumps(body | {"stream": True}))
        chat.get_by_role("button", name="Send").click()
        chat.get_by_text("[DONE]").wait_for()
        whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
        assert chat.get_by_label("text of the answer").inner_text() == whole["choices"][0]["message"]["content"]
        page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
        chat.get_by_role("button", name="Send").click()
        chat.get_by_text("does not answer. Check that it is running").wait_for()
    with opened(browser, f"{server.url}/docs", width=400) as page:
        page.wait_for_selector("main details")
        assert "null" in page.locator("#about code").all_inner_texts()
        page.locator("#find").fill("temperature")
        page.locator("main details details:visible > summary").first.click()
        assert "`" not in page.locator("body").inner_text()
