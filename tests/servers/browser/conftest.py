"""A browser that is driven, and servers whose playground it shows."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cut_wire import EACH_TOKEN
from server_process import ServerProcess
from timeouts import PATIENCE_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SERVER = ("--resume-grace", str(PATIENCE_S), "--lora-paths", "whisper=examples/adapters/whisper", *EACH_TOKEN)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser."""
    pytest.importorskip("playwright.sync_api")
    return CHROMIUM or pytest.skip("there is no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator[object]:
    """One for the tests of a file: as long as it is driven, its event loop runs in this thread, and no other may."""
    sync_api = importlib.import_module("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def real_server(chromium, default_model_source) -> Iterator[ServerProcess]:
    """One with the default model, which keeps streams for clients that come back."""
    with ServerProcess(*SERVER) as running:
        yield running.wait_ready()


@pytest.fixture
def show(browser) -> Iterator[object]:
    """Returns a function that opens an address in a browser of its own: nothing is kept from other tests."""
    contexts = []

    def opened(url: str, *, width: int = 1280, height: int = 800, is_dark: bool = False):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if is_dark else "light"
        )
        context.set_default_timeout(PATIENCE_S * 1000)
        contexts.append(context)
        page = context.new_page()
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.goto(f"{url}/")
        page.wait_for_selector("body[data-ready]")
        return page

    yield opened
    faults = [fault for context in contexts for page in context.pages for fault in page.faults]
    for context in contexts:
        context.close()
    assert faults == []
