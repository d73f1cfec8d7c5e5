"""The page of /status in a browser: what it draws is what the server says, for every eye, width and key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_under_test import LiveServer
from patience import PATIENCE_S, wait_until

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
BEGINNING = "What all of these prompts begin with, some pages long. " * 4


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory) -> Iterator[LiveServer]:
    """Requests with a common beginning run in it, and stand still until the end."""
    with LiveServer(slow=True) as running:
        bodies = [
            {"text": f"{BEGINNING}{number}" * 2, "sampling_params": {"max_new_tokens": 1400}} for number in range(2)
        ]
        for body in bodies:
            threading.Thread(target=_ask, args=(running.url, body), daemon=True).start()
        httpx.post(f"{running.url}/generate", json={"text": ""}, timeout=PATIENCE_S)  # an error to count
        wait_until(lambda: running.stats.num_running == 2 and running.stats.total_steps > 9, "both run")
        httpx.post(f"{running.url}/pause_generation", json={"mode": "in_place"}, timeout=PATIENCE_S)
        yield running


def _ask(url: str, body: dict[str, Any]) -> None:
    with httpx.stream("POST", f"{url}/generate", json=body | {"stream": True}, timeout=PATIENCE_S) as stream:
        for _ in stream.iter_bytes():
            pass


@contextmanager
def opened(browser, url: str, *, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(url)
    yield page
    assert faults == []
    context.close()


def test_it_shows_the_figures_with_a_number_beside_each_plot(browser, server):
    with opened(browser, f"{server.url}/status") as page:
        page.wait_for_selector("polyline")
        for plot in page.locator("figure").all():
            assert plot.locator("svg").get_attribute("role") == "img"
            assert "over the last ten minutes" in plot.locator("svg").get_attribute("aria-label")
            assert plot.locator(".number b").first.inner_text()
        assert page.locator("dt", has_text="Running").locator("xpath=../dd").inner_text() == "2"
        assert page.get_by_role("region", name="Requests that have not ended").locator("tbody tr").count() == 2
        for name in ("Prompt tokens", "Output tokens"):  # both run: what they have so far is in the table below
            fact = page.locator("dt", has_text=name)
            assert (fact.inner_text(), fact.locator("xpath=../dd").inner_text()) == (f"{name}, ended", "0")
        errors = page.get_by_role("region", name="Errors by HTTP status")
        assert errors.locator("tbody td").all_inner_texts()[:2] == ["400", "1"]


def test_the_tree_has_what_is_shared_once_and_says_so_in_words(browser, server):
    with opened(browser, f"{server.url}/status") as page:
        page.wait_for_selector(".tree div")
        shared = len(BEGINNING) // 16 * 16
        assert page.locator(".tree div").first.inner_text() == f"{shared} ×2"
        assert "1 of them shared" in page.locator(".tree").get_attribute("aria-label")
        page.get_by_text("As a table").click()
        row = page.get_by_role("region", name="Branches of the prefix cache").locator("tbody tr").first
        assert row.locator("td").all_inner_texts() == [f"0 to {shared}", f"{shared}", "2", "2"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_screen_or_hard_to_read(browser, server, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with opened(browser, f"{server.url}/status", width=width, scheme=scheme) as page:
        page.wait_for_selector(".tree div")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator("#pause").click()
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def test_the_page_asks_no_other_host_and_only_its_own_script_runs(browser, server):
    context = browser.new_context()
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server.url}/status")
    page.wait_for_selector("polyline")
    assert [url for url in asked if not url.startswith(server.url)] == []
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
    page.wait_for_timeout(100)
    assert page.evaluate("window.ran") is None
    context.close()


def test_it_can_be_paused_by_the_keyboard_and_asks_no_more_until_it_goes_on(browser, server):
    with opened(browser, f"{server.url}/status") as page:
        page.wait_for_selector("polyline")
        page.locator("#pause").focus()
        page.keyboard.press("Enter")
        assert page.locator("#pause").get_attribute("aria-pressed") == "true"
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(2500)
        assert asked == []
        with page.expect_request("**/status/live*"):
            page.keyboard.press("Enter")


def test_who_reads_a_table_by_keyboard_keeps_his_place(browser, server):
    with opened(browser, f"{server.url}/status", width=400) as page:
        region = page.get_by_role("region", name="Requests that have not ended")
        region.focus()
        with page.expect_response("**/status/live*"):
            pass
        with page.expect_response("**/status/live*"):
            pass
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Requests that have not ended"


def test_a_key_is_asked_for_and_kept_for_this_tab_only(browser):
    with LiveServer(api_key="s3cret") as server, opened(browser, f"{server.url}/status") as page:
        page.get_by_text("needs an API key").wait_for()
        page.get_by_label("API key").fill("s3cret")
        page.get_by_label("API key").press("Enter")
        page.get_by_role("heading", name="fake-model").wait_for()
        assert page.evaluate("localStorage.length") == 0
        page.reload()
        page.get_by_role("heading", name="fake-model").wait_for()


def test_use_is_saved_as_csv_and_what_the_server_refuses_is_said_and_not_saved(browser):
    with LiveServer(admin_api_key="b0ss") as server, opened(browser, f"{server.url}/status") as page:
        page.get_by_label("API key").fill("b0ss")
        page.get_by_label("API key").press("Enter")
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


def test_what_a_client_calls_its_request_is_shown_as_text(browser):
    name = "<img src=x onerror=alert(1)>"
    with LiveServer(slow=True) as server:
        body = {"text": "a", "rid": name, "sampling_params": {"max_new_tokens": 1500}}
        threading.Thread(target=_ask, args=(server.url, body), daemon=True).start()
        wait_until(lambda: server.stats.num_running == 1, "it runs")
        httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=PATIENCE_S)
        with opened(browser, f"{server.url}/status") as page:
            page.get_by_text("<img src=x").wait_for()
            assert page.locator("main img").count() == 0


def test_a_server_that_ends_is_told_and_its_successor_is_shown_from_its_start(browser):
    with LiveServer() as first, opened(browser, f"{first.url}/status") as page:
        page.wait_for_selector("figure")
        page.route("**/status/live*", lambda route: route.abort())
        page.get_by_text("does not answer").wait_for()
        page.unroute("**/status/live*")
        page.get_by_text("Helper processes: well").wait_for()


def test_the_pictures_of_the_documentation_can_be_taken(browser, real_server, request, tmp_path):
    folder = IMAGES if request.config.getoption("--write-images", default=False) else tmp_path
    ended = {"text": BEGINNING + "There was", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
    httpx.post(f"{real_server.url}/generate", json=ended, timeout=PATIENCE_S).raise_for_status()
    asking = [
        threading.Thread(
            target=_ask,
            args=(real_server.url, {"text": BEGINNING + story, "sampling_params": {"max_new_tokens": 400}}),
            daemon=True,
        )
        for story in ("Once upon a time", "In a far country", "The sea was calm")
    ]
    for thread in asking:
        thread.start()
    for name, scheme in (("", "light"), ("-dark", "dark")):
        with opened(browser, f"{real_server.url}/status", scheme=scheme) as page:
            page.wait_for_selector("polyline")
            wait_until(lambda: page.locator("polyline").first.get_attribute("points").count(",") > 3, "a plot")
            page.wait_for_selector(".tree div")
            page.locator("//dt[starts-with(., 'Output tokens')]/../dd[. != '0']").wait_for()  # one has ended
            page.locator("#pause").click()
            page.screenshot(path=folder / f"status{name}.png", full_page=True)
        assert (folder / f"status{name}.png").stat().st_size < 300_000
