"""Every view of the playground: rules of accessibility, colours, a narrow window, a keyboard alone, the pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import say, set_fields, tokens

IMAGES = Path(__file__).parents[3] / "docs" / "images"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="module")
def axe():
    return pytest.importorskip("axe_playwright_python.sync_playwright").Axe()


def faults(axe, page) -> list[str]:
    found = axe.run(page, options={"runOnly": {"type": "tag", "values": RULES}}).response["violations"]
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary'][:300]}" for one in found for node in one["nodes"]
    ]


def ask(page) -> None:
    set_fields(page, temperature=0, max_new_tokens=12)
    say(page, "Write one **bold** word, and a list of two rivers.")


def choose_token(page, place: int = 5) -> None:
    page.locator(".token[role=option]").nth(place).click()
    page.wait_for_selector(".explanation .stage")


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (400, True)], ids=["wide, light", "narrow, dark"])
def test_no_view_breaks_a_rule_of_accessibility(show, real_server, axe, is_dark, width):
    page = show(real_server.url, width=width, is_dark=is_dark)
    colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (int(colour[4:-1].split(",")[0]) < 100) is is_dark
    found = {"empty": faults(axe, page)}
    ask(page)
    found["text"] = faults(axe, page)
    page.click("#view-tokens")
    page.click("details.prompt summary")
    page.wait_for_selector("details.prompt .token")
    found["tokens"] = faults(axe, page)
    choose_token(page)
    found["explanation"] = faults(axe, page)
    page.click("#tab-settings")
    page.evaluate("() => { for (const one of document.querySelectorAll('#inspector details')) one.open = true; }")
    page.select_option("#constraint-kind", "regex")
    page.fill("#constraint-text", "[a-")
    page.wait_for_selector("#constraint-verdict.bad")
    set_fields(page, top_p=4)
    found["settings"] = faults(axe, page)
    page.select_option("#constraint-kind", "")
    set_fields(page, top_p="")
    if width < 900:
        page.click("#toggle-inspector")
        page.click("#toggle-side")
        found["conversations"] = faults(axe, page)
        page.click("#toggle-side")
    page.click("article.user >> text=Edit")
    found["editing"] = faults(axe, page)
    page.click("text=Cancel")
    page.locator("article.assistant >> text=Code").click()
    found["code"] = faults(axe, page)
    page.keyboard.press("Escape")
    page.click("#help")
    found["help"] = faults(axe, page)
    page.keyboard.press("Escape")
    page.click("#open-key")
    found["key"] = faults(axe, page)
    page.keyboard.press("Escape")
    page.click("#delete")
    found["delete"] = faults(axe, page)
    page.keyboard.press("Escape")
    page.click("#compare")
    found["compare"] = faults(axe, page)
    assert {view: one for view, one in found.items() if one} == {}


def test_a_window_of_400_pixels_shows_everything_without_scrolling_sideways(show, real_server):
    page = show(real_server.url, width=400, height=800)
    fits = "() => document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    assert not page.locator("#side").is_visible()
    assert not page.locator("#inspector").is_visible()
    page.click("#toggle-inspector")
    page.fill("#field-temperature", "0")
    page.click("#toggle-inspector")
    say(page, "Name a river.")
    page.click("#view-tokens")
    choose_token(page, 1)
    assert page.locator("#inspector").is_visible()
    assert page.evaluate(fits)
    page.keyboard.press("Escape")
    assert not page.locator("#inspector").is_visible()
    page.click("#toggle-side")
    assert page.locator("#new-chat").is_visible()
    page.click("#new-chat")
    page.click("#compare")
    assert page.evaluate(fits)


def test_a_keyboard_is_enough(show, real_server):
    page = show(real_server.url)
    set_fields(page, temperature=0, max_new_tokens=16)
    page.locator("body").press("/")
    page.keyboard.type("Name a river.")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop", state="hidden")
    page.keyboard.press("Alt+v")
    page.locator(".tokens[role=listbox]").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".explanation .stage")
    chosen = page.locator("[role=option][aria-selected=true]")
    assert chosen.get_attribute("data-index") == "3"
    page.locator(".take:not(:disabled)").first.focus()
    before = tokens(page)
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant .switcher:has-text('2 / 2')")
    page.wait_for_selector("#stop", state="hidden")
    assert tokens(page)[:3] == before[:3]
    page.locator("[aria-label='Previous version']").press("Enter")
    page.wait_for_selector("article.assistant .switcher:has-text('1 / 2')")
    page.locator("#tab-token").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#tab-settings").get_attribute("aria-selected") == "true"
    page.locator("body").press("?")
    page.wait_for_selector("dialog >> text=Help and keys")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+n")
    assert page.evaluate("() => document.activeElement.id") == "message"
    page.keyboard.press("Alt+k")
    assert page.evaluate("() => document.activeElement.id") == "search"


def test_the_order_of_tabs_reaches_every_control_and_shows_where_it_is(show, real_server):
    page = show(real_server.url)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        name = page.evaluate("() => document.activeElement.id")
        reached.add(name)
        assert outline != "none" or name == ""
    assert {"new-chat", "search", "view-tokens", "message", "open-key", "theme", "field-temperature"} <= reached


def test_a_page_asks_no_other_host(show, browser, real_server):
    context = browser.new_context()
    page = context.new_page()
    asked, refused = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: refused.append(message.text) if message.type == "error" else None)
    page.goto(f"{real_server.url}/")
    page.wait_for_selector("body[data-ready]")
    say(page, "Hello")
    context.close()
    assert len(asked) > 20
    assert all(url.startswith(f"{real_server.url}/") for url in asked)
    assert refused == []


def test_the_pictures_of_the_documentation_can_be_taken(show, real_server, request, tmp_path):
    folder = IMAGES if request.config.getoption("--write-images", default=False) else tmp_path
    folder.mkdir(exist_ok=True)
    for name, is_dark, width in (("", False, 1280), ("-dark", True, 1280), ("-narrow", False, 400)):
        page = show(real_server.url, width=width, height=760, is_dark=is_dark)
        set_fields(page, temperature=0.8, sampling_seed=7, max_new_tokens=64)
        say(page, "Describe the sea in two sentences.")
        page.click("#view-tokens")
        if width > 900:
            choose_token(page, 6)
        page.screenshot(path=folder / f"playground{name}.png")
        assert (folder / f"playground{name}.png").stat().st_size < 300_000
