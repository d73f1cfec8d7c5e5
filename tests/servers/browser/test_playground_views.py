"""Every view of the playground: rules of accessibility, colours, a narrow window, a keyboard alone, the pictures."""

from __future__ import annotations

from collections.abc import Iterator

from driving import ATTACH, choose_token, faults_of_accessibility, say, set_fields, tokens


def ask(page) -> None:
    set_fields(page, temperature=0, max_new_tokens=30)
    say(page, "Write a Python function that reverses a string with slicing.")
    page.wait_for_selector(".code .code-keyword")
    page.wait_for_selector("article.assistant >> text=Continue")


def test_no_view_breaks_a_rule_of_accessibility(show, real_server):
    found = {
        (width, view): faults_of_accessibility(page, where)
        for width, is_dark in ((1280, False), (400, True))
        for page in [show(real_server.url, width=width, is_dark=is_dark)]
        for view, where in views(page, width, is_dark)
    }
    assert len(found) == 2 * 12 + 1
    assert {view: broken for view, broken in found.items() if broken} == {}


def views(page, width: int, is_dark: bool) -> Iterator[tuple[str, str]]:
    """Bring up one view after the other. Yield its name, and the selector of what is new in it."""
    colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (int(colour[4:-1].split(",")[0]) < 100) is is_dark
    yield "empty", "html"
    ask(page)
    yield "text", "#turns"
    page.click("#view-tokens")
    page.click("details.prompt summary")
    page.wait_for_selector("details.prompt .token")
    choose_token(page)
    yield "tokens and explanation", "html"
    page.click("#tab-settings")
    page.evaluate("() => { for (const one of document.querySelectorAll('#inspector details')) one.open = true; }")
    page.select_option("#constraint-kind", "regex")
    page.fill("#constraint-text", "[a-")
    page.wait_for_selector("#constraint-verdict.bad")
    set_fields(page, top_p=4)
    yield "settings", "#inspector"
    page.select_option("#constraint-kind", "")
    set_fields(page, top_p="")
    if width < 900:
        page.click("#toggle-inspector")
        page.click("#toggle-side")
        yield "conversations", "#side"
    page.click("#conversations .rename")
    yield "renaming", "#side"
    page.keyboard.press("Escape")
    if width < 900:
        page.click("#toggle-side")
    page.evaluate(ATTACH, ["notes.md", [97]])
    page.wait_for_selector(".preview .file")
    yield "attached", "#composer"
    page.get_by_role("button", name="Remove notes.md").click()
    page.click("article.user >> text=Edit")
    yield "editing", "article.user"
    page.click("text=Cancel")
    page.locator("article.assistant >> text=Code").click()
    yield "code", "dialog"
    page.keyboard.press("Escape")
    page.click("#help")
    yield "help", "dialog"
    page.keyboard.press("Escape")
    page.click("#open-key")
    yield "key", "dialog"
    page.keyboard.press("Escape")
    page.click("#delete")
    yield "delete", "dialog"
    page.keyboard.press("Escape")
    page.click("#compare")
    yield "compare", ".compare"


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
    page.focus("#panel-token")
    page.keyboard.press("Escape")
    assert not page.locator("#inspector").is_visible()
    assert page.evaluate("() => document.activeElement.id") == "toggle-inspector"
    choose_token(page, 1)
    page.locator(".take:not(:disabled)").first.click()
    page.wait_for_selector("article.assistant .switcher:has-text('2 / 2')")
    assert not page.locator("#inspector").is_visible()
    page.wait_for_selector("#stop", state="hidden")
    page.click("#toggle-side")
    assert page.locator("#new-chat").is_visible()
    page.click("#new-chat")
    page.click("#compare")
    assert page.evaluate(fits)


def test_four_columns_of_settings_fit_beside_both_panels(show, real_server):
    for width in (1000, 1280, 1600):
        page = show(real_server.url, width=width)
        page.click("#compare")
        for _ in range(2):
            page.click("text=Add a column")
        page.locator(".column details > summary >> text=Settings").first.click()
        stage, columns, inside = page.evaluate("""() => [
            document.getElementById("stage").scrollWidth - document.getElementById("stage").clientWidth,
            [...document.querySelectorAll(".column")].map((one) => one.scrollWidth - one.clientWidth),
            [...document.querySelectorAll(".column *")].filter((one) => one.getClientRects().length).map(
                (one) => one.getBoundingClientRect().right - one.closest(".column").getBoundingClientRect().right),
        ]""")
        assert (stage, columns) == (0, [0] * 4), width
        assert max(inside) <= 0, width


def test_a_keyboard_is_enough(show, real_server):
    page = show(real_server.url)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "() => [document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(name)
        assert outline != "none" or name == ""
    assert {"new-chat", "search", "view-tokens", "message", "open-key", "theme", "field-temperature"} <= reached

    set_fields(page, temperature=0, max_new_tokens=16)
    page.evaluate("() => document.activeElement.blur()")
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
    page.wait_for_selector("#panel-token >> text=choose a token")  # no longer that of the other version
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
    for typed, code in (("Dead", "KeyN"), ("\u02da", "KeyK")):  # as Option makes them on a Mac
        page.evaluate(
            "([key, code]) => dispatchEvent(new KeyboardEvent('keydown', {key, code, altKey: true}))", [typed, code]
        )
        wanted = {"KeyN": "message", "KeyK": "search"}[code]
        page.wait_for_function("(wanted) => document.activeElement.id === wanted", arg=wanted)
