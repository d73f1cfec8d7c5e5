"""The page of /status in a browser: what it draws is what the server says, for every eye, width and key."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from app_under_test import LiveServer
from driving import faults_of_looks, opened
from timeouts import PATIENCE_S, wait_until

BEGINNING = "What all of these prompts begin with, some pages long. " * 4
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def server(browser) -> Iterator[LiveServer]:
    """Requests with a common beginning run in it, and stand still until the end."""
    with LiveServer(slow=True) as running:
        for rid in (HOSTILE, "second"):
            body = {"text": f"{BEGINNING}{rid}" * 2, "rid": rid, "sampling_params": {"max_new_tokens": 1400}}
            threading.Thread(target=_ask, args=(running.url, body), daemon=True).start()
        httpx.post(f"{running.url}/generate", json={"text": ""}, timeout=PATIENCE_S)  # an error to count
        wait_until(lambda: running.stats.num_running == 2 and running.stats.total_steps > 9, "both run")
        httpx.post(f"{running.url}/pause_generation", json={"mode": "in_place"}, timeout=PATIENCE_S)
        yield running


def _ask(url: str, body: dict[str, Any]) -> None:
    with httpx.stream("POST", f"{url}/generate", json=body | {"stream": True}, timeout=PATIENCE_S) as stream:
        for _ in stream.iter_bytes():
            pass


def test_it_shows_the_figures_in_words_too_and_what_clients_say_as_text(browser, server):
    with opened(browser, f"{server.url}/status") as page:
        page.wait_for_selector("polyline")
        for plot in page.locator("figure").all():
            assert plot.locator("svg").get_attribute("role") == "img"
            assert "over the last ten minutes" in plot.locator("svg").get_attribute("aria-label")
            assert plot.locator(".number b").first.inner_text()
        assert page.locator("dt", has_text="Running").locator("xpath=../dd").inner_text() == "2"
        running = page.get_by_role("region", name="Requests that have not ended")
        assert running.locator("tbody tr").count() == 2
        running.get_by_text(HOSTILE[:10]).wait_for()
        assert page.locator("main img").count() == 0
        for name in ("Prompt tokens", "Output tokens"):  # both run: what they have so far is in the table below
            fact = page.locator("dt", has_text=f"{name} (finished requests)")
            assert fact.locator("xpath=../dd").inner_text() == "0"
        errors = page.get_by_role("region", name="Errors by HTTP status")
        assert errors.locator("tbody td").all_inner_texts()[:2] == ["400", "1"]
        page.wait_for_selector(".tree div")
        shared = len(BEGINNING) // 16 * 16
        assert page.locator(".tree div").first.inner_text() == f"{shared} ×2"
        assert "1 of them shared" in page.locator(".tree").get_attribute("aria-label")
        leaf = page.locator(".tree div").last.get_attribute("title")
        assert leaf.endswith("tokens, 1 running request, 0 continuations"), leaf
        page.get_by_text("As a table").click()
        row = page.get_by_role("region", name="Branches of the prefix cache").locator("tbody tr").first
        assert row.locator("td").all_inner_texts() == [f"0 to {shared}", f"{shared}", "2", "2"]
        page.locator("#pause").click()
        every_figure_is_explained(page)
        every_series_of_the_metrics_has_its_help(page)
        a_plot_is_read_at_a_point(page)
        assert faults_of_looks(page) == {}


def every_figure_is_explained(page) -> None:
    """Check that each name of a figure shows its explanation to the pointer and to the keyboard."""
    names = page.locator("figure h3, .facts dt, main th").all()
    assert len(names) > 20
    assert [name.inner_text() for name in names if not name.locator("[data-about]").count()] == []
    waiting = page.locator("dt [data-about]", has_text="Waiting").first
    waiting.hover()
    page.wait_for_selector("#tip >> text=wait until running requests end")
    page.mouse.move(0, 0)
    page.wait_for_selector("#tip", state="hidden")
    page.get_by_text("Preempted").focus()
    page.wait_for_selector("#tip >> text=the KV cache was full")
    assert page.get_by_text("Preempted").get_attribute("aria-describedby") == "tip"
    page.keyboard.press("Escape")
    page.wait_for_selector("#tip", state="hidden")


def every_series_of_the_metrics_has_its_help(page) -> None:
    """Check that the table of all figures explains each name with the text of /metrics."""
    page.get_by_text("All figures of /metrics").click()
    page.wait_for_selector("td [data-about='Preemptions of running requests because no KV page was free.']")
    names = page.locator("[aria-label='All figures'] td:first-child").all()
    assert len(names) > 40
    assert [name.inner_text() for name in names if not name.locator("[data-about]").count()] == []


def a_plot_is_read_at_a_point(page) -> None:
    plot = page.locator("figure", has_text="Requests").first
    slider = plot.get_by_role("slider")
    slider.focus()
    assert slider.get_attribute("aria-valuetext") == "now: 2 running, 0 waiting"
    assert plot.locator("output").inner_text() == "now: 2 running, 0 waiting"
    page.keyboard.press("Home")
    assert plot.locator("output").inner_text() == "9 min 58 s ago: no value"
    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
    assert re.match(r"[45] min \d+ s ago: no value", plot.locator("output").inner_text())
    assert plot.locator(".cursor").is_visible()
    page.evaluate("() => document.activeElement.blur()")
    page.mouse.move(0, 0)
    assert not plot.locator(".cursor").is_visible()
    assert plot.locator("output").inner_text().startswith("top: ")


def test_it_goes_on_and_pauses_by_the_keyboard_and_runs_no_script_but_its_own(browser, server):
    with opened(browser, f"{server.url}/status", width=400) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_selector("polyline")
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
        region = page.get_by_role("region", name="Requests that have not ended")
        region.focus()
        for _ in range(2):
            with page.expect_response("**/status/live*"):
                pass
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Requests that have not ended"
        assert page.evaluate("window.ran") is None
        page.locator("#pause").focus()
        page.keyboard.press("Enter")
        assert page.locator("#pause").get_attribute("aria-pressed") == "true"
        assert [url for url in asked if not url.startswith(server.url)] == []
        asked.clear()
        page.wait_for_timeout(2500)
        assert asked == []
        with page.expect_request("**/status/live*"):
            page.keyboard.press("Enter")


def enter_key(page, key: str) -> None:
    page.get_by_text("needs an API key").wait_for()
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")
    page.get_by_role("heading", name="fake-model").wait_for()


def test_a_key_is_asked_for_and_kept_for_this_tab_only_and_the_admin_s_saves_use_as_csv(browser):
    with LiveServer(api_key="s3cret", admin_api_key="b0ss") as server:
        with opened(browser, f"{server.url}/status") as page:
            enter_key(page, "s3cret")
            assert page.evaluate("localStorage.length") == 0
            page.reload()
            page.get_by_role("heading", name="fake-model").wait_for()
        with opened(browser, f"{server.url}/status") as page:
            enter_key(page, "b0ss")
            save_use(page)


def save_use(page) -> None:
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    assert saved.value.path().read_text().startswith("day,client,")
    downloads: list[Any] = []
    page.on("download", lambda one: downloads.append(one))
    page.locator("#pause").click()
    refusal = {"error": {"message": "the admin key is needed"}}
    page.route("**/usage?format=csv", lambda route: route.fulfill(status=403, json=refusal))
    page.get_by_role("button", name="Save as CSV").click()
    page.get_by_text("The use was not saved: the admin key is needed").wait_for()
    assert downloads == []


def test_a_server_that_ends_is_told_and_its_successor_is_shown_from_its_start(browser):
    with LiveServer() as first, opened(browser, f"{first.url}/status") as page:
        page.wait_for_selector("figure")
        page.route("**/status/live*", lambda route: route.abort())
        page.get_by_text("The server does not answer; trying again.").wait_for()
        page.unroute("**/status/live*")
        page.get_by_text("Helper processes are running").wait_for()
