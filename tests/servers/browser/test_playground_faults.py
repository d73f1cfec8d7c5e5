"""The playground where things go wrong: connections that break, servers that stop, keys, and what a model may write."""

from __future__ import annotations

import json

import pytest
from app_under_test import LiveServer
from cut_wire import CutWire
from driving import constrain, say, set_fields, tokens, wait_state
from timeouts import PATIENCE_S, wait_until

COUNT = "Count from one to fifty."


@pytest.fixture
def wire(real_server):
    running = CutWire(int(real_server.url.rsplit(":", 1)[1]))
    yield running
    running.close()


def whole_answer(show, server) -> list[str]:
    page = show(server.url)
    set_fields(page, temperature=0, max_new_tokens=60, ignore_eos=True)
    say(page, COUNT)
    page.click("#view-tokens")
    return tokens(page)


def test_what_is_sent_while_the_page_still_loads_is_sent_when_it_has(browser, real_server):
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    faults, held = [], []
    page.on("pageerror", lambda error: faults.append(error))
    page.route("**/v1/models", lambda route: held.append(route))
    with page.expect_request("**/v1/models"):
        page.goto(f"{real_server.url}/", wait_until="load")
    page.fill("#message", COUNT)
    page.keyboard.press("Enter")
    page.keyboard.press("Alt+v")
    assert not page.locator("article").count()
    wait_until(lambda: page.title() and held, "the question that is held")  # asking the page lets its routes run
    for route in held:
        route.continue_()
    wait_state(page, "done")
    assert page.locator("article.user").text_content().count(COUNT) == 1
    assert faults == []
    page.close()


def test_a_stream_that_is_cut_goes_on_where_it_stopped(show, wire, real_server):
    expected = whole_answer(show, real_server)
    page = show(wire.url)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.click("#view-tokens")
    set_fields(page, temperature=0, max_new_tokens=60, ignore_eos=True)
    wire.cut_after = 6
    say(page, COUNT, wait=False)
    wait_state(page, "lost")
    assert "Connection lost" in page.locator("article.assistant .note").text_content()
    assert wire.was_cut.is_set()
    wire.is_down = False
    wait_state(page, "done")
    assert tokens(page) == expected
    assert sum(url.endswith("/events") for url in asked) >= 1
    assert sum(url.endswith("/v1/chat/completions") for url in asked) == 1


def test_a_server_that_is_down_is_named_and_the_message_is_sent_again_when_it_is_back(show, wire):
    page = show(wire.url)
    set_fields(page, temperature=0, max_new_tokens=8)
    wire.is_down = True
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    say(page, "Name a river.")
    said = page.locator("article.assistant .note.bad").text_content()
    assert f"The server at {wire.url.removeprefix('http://')} does not answer" in said
    assert "Failed to fetch" not in said
    wire.is_down = False
    page.unroute("**/v1/chat/completions")
    page.click("text=Try again")
    wait_state(page, "done")


def test_another_server_in_its_place_gives_the_same_answer_again(show, wire, server):
    """The other one knows nothing of the stream, as after a restart."""
    page = show(wire.url)
    page.click("#view-tokens")
    set_fields(page, temperature=1, max_new_tokens=40, ignore_eos=True)
    wire.cut_after = 6
    say(page, COUNT, wait=False)
    wait_state(page, "lost")
    before = tokens(page)
    wire.target = int(server.url.rsplit(":", 1)[1])
    wire.is_down = False
    wait_state(page, "done")
    after = tokens(page)
    assert 0 < len(before) < len(after) == 40
    assert after[: len(before)] == before


def test_an_answer_may_be_stopped_left_or_deleted_while_it_comes(show, wire):
    page = show(wire.url)
    page.click("#view-tokens")
    set_fields(page, temperature=0, max_new_tokens=60, ignore_eos=True)
    wire.hold_after = 1
    say(page, COUNT, wait=False)
    page.wait_for_selector("article.assistant")
    page.click("#new-chat")
    assert not page.locator("#stop").is_visible()
    wire.hold_after = None
    say(page, "Name a river.")
    assert page.locator("article.assistant[data-state=done]").count() == 1
    wire.hold_after = 6
    say(page, "Name another.", wait=False)
    page.wait_for_selector("#stop")
    page.focus("#stop")
    with page.expect_request(lambda request: request.url.endswith("/abort_request")):
        page.keyboard.press("Enter")
    wait_state(page, "stopped")
    assert page.evaluate("() => document.activeElement.id") == "message"
    wire.release()
    page.click(f"#conversations .conversation:has-text('{COUNT}')")
    wait_state(page, "done")
    assert len(tokens(page)) == 60
    page.click("#delete")
    page.click("dialog button.primary")
    page.click("#conversations .conversation:has-text('river')")
    page.click("#delete")
    page.click("dialog button.primary")

    set_fields(page, temperature=0, max_new_tokens=60, ignore_eos=True)
    say(page, COUNT)
    page.click("#new-chat")
    wire.hold_after = 6
    say(page, COUNT, wait=False)
    page.wait_for_selector(".token[role=option]")
    with page.expect_request(lambda request: request.url.endswith("/abort_request")):
        page.press("#message", "Escape")
    wait_state(page, "stopped")
    wire.release()
    assert 0 < len(tokens(page)) < 60
    say(page, "Go on.")
    assert page.locator("article.assistant[data-state=done]").count() == 1

    page.click("#new-chat")
    wire.hold_after = 6
    say(page, "Count to nine.", wait=False)
    page.wait_for_selector(".token[role=option]")
    page.click("#delete")
    with page.expect_request(lambda request: request.url.endswith("/abort_request")):
        page.click("dialog button.primary")
    wire.release()
    page.wait_for_selector("#stop", state="hidden")
    assert {one["title"] for one in stored(page)} == {COUNT}
    assert page.locator("#conversations .name").all_text_contents() == [COUNT] * 2


def test_a_key_is_asked_for_where_the_server_wants_one(show):
    with LiveServer(api_key="s3cret", chat_template="chatml") as server:
        page = show(server.url)
        page.wait_for_selector("dialog >> text=API key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("dialog .fault >> text=the key that was sent is wrong")
        page.fill("#key", "s3cret")
        page.press("#key", "Enter")
        page.wait_for_selector("dialog", state="detached")
        page.wait_for_function("() => document.getElementById('model').value !== ''")
        page.click("summary:has-text('Tools')")
        page.fill("#tools", '{"type": "custom", "custom": {"name": "note"}}')
        page.select_option("#tool-choice", "none")
        say(page, "Hello")
        page.click("article.assistant >> text=Code")
        said = {}
        for name in ("curl", "Python", "openai", "anthropic", "ollama"):
            page.click(f"dialog [role=tab]:has-text('{name}')")
            said[name] = page.locator("#program").inner_text()
        assert "cannot be written" in said.pop("anthropic")
        assert [name for name, program in said.items() if "TUREEN_KEY" not in program or "s3cret" in program] == []


def test_a_browser_that_keeps_nothing_has_the_playground_all_the_same(browser, live):
    page = browser.new_page()
    page.add_init_script("""for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
        Object.defineProperty(window, name, {get() { throw new DOMException("blocked", "SecurityError"); }});
    }""")
    page.goto(f"{live.url}/")
    page.wait_for_selector("body[data-ready]")
    page.click("#view-tokens")
    set_fields(page, max_new_tokens=4)
    say(page, "Hello")
    assert page.locator("article.assistant[data-state=done]").count() == 1
    page.close()


REVERSING = "\u202e\u202c\u2066\u2069"
HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(2)</script>",
    "[click](javascript:alert(3)) ![p](http://elsewhere.example/p.png) <http://elsewhere.example>",
    "safe \u202ereversed\u202c \u2066isolated\u2069",
    "<style>*{display:none}</style><iframe src='//elsewhere.example'></iframe>",
    "```\n</code></pre><script>alert(4)</script>\n```",
]


def test_what_a_model_writes_is_text(show, live):
    page = show(live.url)
    asked, alerts = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    set_fields(page, max_new_tokens=600)
    text = "\n\n".join(HOSTILE)
    constrain(page, "ebnf", f"root ::= {json.dumps(text, ensure_ascii=False)}")
    page.wait_for_selector("#constraint-verdict.good")
    say(page, text)
    for view in ("#view-text", "#view-tokens"):
        page.click(view)
        check_is_text(page, text)
    assert alerts == []
    assert [url for url in asked if not url.startswith((live.url, "blob:", "data:"))] == []


def check_is_text(page, text: str) -> None:
    """Check the one turn: both have written the text."""
    said = page.locator("article.assistant .body")
    assert said.text_content().strip(), text
    assert said.locator("script, img, style, iframe, [onerror], a[href^=javascript]").count() == 0
    shown = page.locator("article.user .body").text_content()
    assert not set(shown) & set(REVERSING)
    for character in REVERSING:
        shown = shown.replace(f"‹U+{ord(character):04X}›", character)
    assert shown == text
    assert not set(said.text_content()) & set(REVERSING)


def imported(page, tmp_path, nodes, selected, **fields) -> None:
    conversation = {"title": "t", "system": "", "tools": "", "model": "", "nodes": nodes, "selected": selected} | fields
    path = tmp_path / "conversation.json"
    path.write_text(json.dumps({"form": "tureen-conversations", "version": 1, "conversations": [conversation]}))
    with page.expect_file_chooser() as chooser:
        page.click("#import")
    chooser.value.set_files(path)


def answer_node(name: str, parent: str, text: str, token_texts: list[str]) -> dict:
    made = {"model": "", "settings": {}, "system": "", "tools": "", "toolChoice": "auto", "seed": 1, "kept": []}
    listed = [{"id": index, "text": one, "logprob": -0.5} for index, one in enumerate(token_texts)]
    node = {"id": name, "parent": parent, "role": "assistant", "text": text, "tokens": listed, "state": "done"}
    return node | {"made": made | {"keptText": "", "explain": False}, "figures": {}, "calls": []}


def chain(texts: list[tuple[str, str, list[str]]]) -> tuple[dict, dict]:
    """Returns the nodes of turns (question, answer, tokens), and which are shown."""
    nodes, selected, last = {}, {}, ""
    for index, (question, text, token_texts) in enumerate(texts):
        said, answered = f"u{index}", f"a{index}"
        nodes[said] = {"id": said, "parent": last or None, "role": "user", "text": question}
        nodes[answered] = answer_node(answered, said, text, token_texts)
        selected |= {last: said, said: answered}
        last = answered
    return nodes, selected


@pytest.fixture(scope="module")
def live(browser):
    with LiveServer(chat_template="chatml") as server:
        yield server


def test_a_link_of_an_answer_leads_to_other_hosts_only_and_markdown_grows_by_its_last_block(show, live):
    page = show(live.url)
    text = (
        f"[own](/release_memory_occupation) [whole]({live.url}/flush_cache) [near](flush_cache) [same](//127.0.0.1/x) "
        "[ftp](ftp://elsewhere.example/) [other](https://elsewhere.example/page) [mail](mailto:a@elsewhere.example)"
        "\n\n7. seven\n\n```python\n1\n```"
    )
    links, shown, list_start, kind = page.evaluate(
        """async (text) => {
        const { showMarkdown } = await import("./playground/markdown.js");
        const holder = document.createElement("div");
        showMarkdown(holder, text);
        const links = [...holder.querySelectorAll("a")].map((one) => one.href);
        return [links, holder.textContent, holder.querySelector("ol").start, holder.querySelector("code").className];
    }""",
        text,
    )
    assert links == ["https://elsewhere.example/page", "mailto:a@elsewhere.example"]
    assert shown.split()[:7] == ["own", "whole", "near", "same", "ftp", "other", "mail"]
    assert (list_start, kind) == (7, "language-python")
    added = page.evaluate("""async () => {
        const { showMarkdown } = await import("./playground/markdown.js");
        const holder = document.createElement("div");
        document.body.append(holder);
        let added = 0;
        new MutationObserver((all) => { for (const one of all) added += one.addedNodes.length; })
            .observe(holder, {childList: true});
        let text = "";
        for (let index = 0; index < 400; index++) {
            text += `Paragraph ${index} has *words*.\\n\\n`;
            showMarkdown(holder, text);
        }
        await new Promise((resolve) => setTimeout(resolve));
        return [added, holder.children.length, holder.querySelectorAll("em").length];
    }""")
    assert added == [400, 400, 400]


DAMAGES = {
    "a circle of turns shown": lambda found: found["selected"].update(a1="u0"),
    "a circle of parents": lambda found: found["nodes"]["u0"].update(parent="a1"),
    "another name": lambda found: found["nodes"]["a1"].update(id="a0"),
    "settings": lambda found: found.update(settings=None),
    "settings of an answer": lambda found: found["nodes"]["a1"]["made"].update(settings=None),
    "no figures": lambda found: found["nodes"]["a1"].pop("figures"),
    "a figure": lambda found: found["nodes"]["a1"].update(figures={"ttft": "soon"}),
    "a token": lambda found: found["nodes"]["a1"].update(tokens=[None]),
    "a kept token": lambda found: found["nodes"]["a1"]["made"].update(kept=[1]),
    "a call": lambda found: found["nodes"]["a1"].update(calls=[{"name": "f"}]),
    "no turns": lambda found: found.update(nodes={}),
    "a prompt": lambda found: found["nodes"]["a1"]["made"].update(system={}),
}


def stored(page) -> list[dict]:
    """What the browser keeps once everything is written."""
    return page.evaluate("""async () => {
        dispatchEvent(new Event("pagehide"));
        return (await import("./playground/store.js")).all();
    }""")


def test_a_damaged_file_is_refused_and_what_was_read_is_shown_as_it_is(show, live, tmp_path):
    page = show(live.url)
    for where, damage in DAMAGES.items():
        nodes, selected = chain([("One", "1", ["1"]), ("Two", "2", ["2"])])
        found = {"nodes": nodes, "selected": selected}
        damage(found)
        imported(page, tmp_path, **found)
        page.wait_for_selector(".toast >> text=conversation 1 is damaged")
        page.evaluate("() => document.getElementById('toasts').replaceChildren()")
        assert (where, stored(page)) == (where, [])

    imported(page, tmp_path, *chain([("Go", "Gone", [])]))
    page.wait_for_selector("article.assistant")
    before = [one["updated"] for one in stored(page)]
    page.click("#new-chat")
    page.click("#conversations .conversation")
    page.wait_for_selector("article.assistant")
    assert [one["updated"] for one in stored(page)] == before  # it was only opened

    long = "<b>" + "x" * (1 << 20)
    imported(page, tmp_path, *chain([("Go", long, [])]))
    page.wait_for_function("() => document.querySelector('article.assistant .body').textContent.length > 1 << 20")
    assert page.locator("article.assistant .body").text_content() == long
    assert page.locator("article.assistant .body *").count() <= 2
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_a_conversation_that_cannot_be_shown_does_not_keep_the_page_from_opening(show, live):
    page = show(live.url)
    page.evaluate("""async () => {
        const { create } = await import("./playground/conversation.js");
        await (await import("./playground/store.js")).save(create({title: "Broken", settings: null}));
    }""")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#conversations .name").all_text_contents() == ["Broken"]
    set_fields(page, max_new_tokens=4)
    say(page, "Hello")
    assert page.locator("article.assistant[data-state=done]").count() == 1


def test_of_two_hundred_turns_and_four_thousand_tokens_only_what_changes_is_made_anew(show, live, tmp_path):
    page = show(live.url)
    page.click("#view-tokens")
    turns = [(f"Question {index}", f"Answer {index}", ["Answer", f" {index}"]) for index in range(199)]
    words = [f" word{index}" for index in range(4000)]
    imported(page, tmp_path, *chain([*turns, ("Last", "".join(words), words)]))
    page.wait_for_selector("#turn-a199 .token >> nth=3999")
    style = "getComputedStyle(one).contentVisibility"
    styles = page.evaluate(f"() => [...document.querySelectorAll('.turn')].map((one) => {style})")
    assert set(styles) == {"auto"}
    assert page.locator("article").count() == 400
    page.evaluate("""() => {
        window.added = 0;
        new MutationObserver((all) => { for (const one of all) added += one.addedNodes.length; })
            .observe(document.getElementById("turns"), {childList: true, subtree: true});
    }""")
    page.locator("#turn-a199 .token").nth(3000).click()
    assert page.evaluate("added") == 0
    page.evaluate("() => { document.getElementById('stage').scrollTop = 0; }")
    assert page.evaluate("added") == 0
    page.click("#tab-settings")
    set_fields(page, max_new_tokens=30)
    say(page, "One more")
    assert page.locator("article").count() == 402
    assert page.evaluate("added") < 30 * 12
