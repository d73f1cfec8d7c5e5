"""The pictures in docs/images can be taken; `--write-images` takes new ones."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
from driving import choose_token, opened, say, set_fields
from timeouts import PATIENCE_S, wait_until

IMAGES = Path(__file__).parents[3] / "docs" / "images"
MOST_BYTES = 300_000
BEGINNING = "What all of these prompts begin with, some pages long. " * 4


@pytest.fixture
def is_writing(request) -> bool:
    return request.config.getoption("--write-images", default=False)


@pytest.fixture
def folder(is_writing, tmp_path) -> Path:
    return IMAGES if is_writing else tmp_path


def test_the_pictures_of_the_playground_can_be_taken(show, real_server, folder, is_writing):
    pictures = ("", False, 1280), ("-dark", True, 1280), ("-narrow", False, 400)
    for name, is_dark, width in pictures if is_writing else pictures[:1]:
        page = show(real_server.url, width=width, height=760, is_dark=is_dark)
        set_fields(page, temperature=0.8, sampling_seed=7, max_new_tokens=64 if is_writing else 8)
        say(page, "Describe the sea in two sentences.")
        page.click("#view-tokens")
        if width > 900:
            choose_token(page, 6)
        page.screenshot(path=folder / f"playground{name}.png")
        assert (folder / f"playground{name}.png").stat().st_size < MOST_BYTES


def test_the_pictures_of_the_status_page_can_be_taken(browser, real_server, folder, is_writing):
    params = {"max_new_tokens": 40, "ignore_eos": True}
    ended = {"text": BEGINNING + "There was", "sampling_params": params}
    httpx.post(f"{real_server.url}/generate", json=ended, timeout=PATIENCE_S).raise_for_status()
    for story in ("Once upon a time", "In a far country", "The sea was calm"):
        body = {"text": BEGINNING + story, "sampling_params": {"max_new_tokens": 400}}
        threading.Thread(
            target=httpx.post,
            args=(f"{real_server.url}/generate",),
            kwargs={"json": body, "timeout": PATIENCE_S},
            daemon=True,
        ).start()
    with opened(browser, f"{real_server.url}/status") as page:
        page.wait_for_selector("polyline")
        wait_until(lambda: page.locator("polyline").first.get_attribute("points").count(",") > 3, "a plot")
        page.wait_for_selector(".tree div")
        page.locator("//dt[starts-with(., 'Output tokens')]/../dd[. != '0']").wait_for()  # one has ended
        page.locator("#pause").click()
        pictures = ("", "light"), ("-dark", "dark")
        for name, scheme in pictures if is_writing else pictures[:1]:
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=folder / f"status{name}.png", full_page=True)
            assert (folder / f"status{name}.png").stat().st_size < MOST_BYTES
    httpx.post(f"{real_server.url}/abort_request", json={"abort_all": True}, timeout=PATIENCE_S).raise_for_status()
