"""Conversations of the playground: drafts, attached files, names, cut answers, a full context."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from app_under_test import LiveServer
from driving import ATTACH, answers, chat_turns, constrain, say, set_fields, tokens, wait_state
from timeouts import PATIENCE_S

LIST = "Name three rivers of Europe."
TEXT = 'Rivers: "```" is a fence.\nThe Rhine is one.\n'


@pytest.fixture(scope="module")
def live(browser):
    with LiveServer(chat_template="chatml") as server:
        yield server


def sent_bodies(page) -> list[dict[str, Any]]:
    """The bodies of the chats that the page asks for from now on."""
    bodies: list[dict[str, Any]] = []

    def keep(request) -> None:
        body = request.post_data if request.url.endswith("/chat/completions") else None
        if body and json.loads(body)["max_new_tokens" if "max_new_tokens" in body else "max_tokens"]:
            bodies.append(json.loads(body))

    page.on("request", keep)
    return bodies


def test_drafts_and_attached_files_survive_a_reload_and_conversations_are_renamed_and_deleted_in_the_list(show, live):
    page = show(live.url)
    set_fields(page, max_new_tokens=4)
    bodies = sent_bodies(page)
    assert page.locator(".suggestion:visible").count() == 3
    page.locator(".suggestion").first.click()
    wait_state(page, "done")
    assert page.locator(".suggestion:visible").count() == 0
    assert bodies[-1]["messages"] == [{"role": "user", "content": "What is the capital of Japan?"}]

    page.click("#new-chat")
    page.evaluate(ATTACH, ["zeros.bin", [0, 1, 2]])
    page.wait_for_selector(".toast >> text=zeros.bin is neither text nor a picture")
    page.evaluate(ATTACH, ["rivers.md", list(TEXT.encode())])
    page.evaluate(ATTACH, ["gone.md", [97]])
    page.get_by_role("button", name="Remove gone.md").click()
    page.fill("#message", "Which rivers?")
    page.evaluate("() => dispatchEvent(new Event('pagehide'))")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.input_value("#message") == "Which rivers?"
    assert page.locator(".preview .file").all_inner_texts() == ["rivers.md"]
    set_fields(page, max_new_tokens=4)
    page.locator("#conversations .conversation", has_text="Japan").click()
    assert page.input_value("#message") == ""
    page.locator("#conversations .conversation", has_text="New chat").click()
    page.press("#message", "Enter")
    wait_state(page, "done")
    assert bodies[-1]["messages"][0]["content"] == f"rivers.md:\n````\n{TEXT}````\n\nWhich rivers?"
    assert page.locator("article.user .attached summary").inner_text() == "rivers.md"
    assert page.input_value("#message") == ""

    for key, name in (("Escape", "Which rivers?"), ("Enter", "Waters")):
        page.locator("#conversations li:has([aria-current]) .rename").click()
        page.keyboard.type("Waters")
        page.keyboard.press(key)
        assert page.locator("#conversations [aria-current] .name").inner_text() == name
    assert page.locator("#title").inner_text() == "Waters"
    assert page.evaluate("() => document.activeElement.className") == "conversation"
    page.locator("#conversations li", has_text="Japan").hover()
    page.get_by_role("button", name="Delete What is the capital of Japan?").click()
    page.click("dialog button.primary")
    page.wait_for_function("() => document.querySelectorAll('#conversations .name').length === 1")
    assert page.locator("#title").inner_text() == "Waters"
    page.evaluate("() => dispatchEvent(new Event('pagehide'))")
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.locator("#conversations .name").all_inner_texts() == ["Waters"]


def test_the_selector_says_which_models_are_loaded_and_a_server_that_is_down_is_waited_for(show, live):
    page = show(live.url)
    set_fields(page, max_new_tokens=4)
    (name,) = page.locator("#model option").all_inner_texts()
    states = ["unloaded", "loading", "loaded"]

    def models(route) -> None:
        listed = httpx.get(f"{live.url}/v1/models").json()
        (one,) = listed["data"]
        status = states[0] if len(states) == 1 else states.pop(0)
        route.fulfill(json=listed | {"data": [one | {"status": status}, one | {"id": "other", "status": "unloaded"}]})

    page.route("**/v1/models", models)
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#model option").all_inner_texts() == [f"{name} (not loaded)", "other (not loaded)"]
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    say(page, "Hello", wait=False)
    page.wait_for_selector(f"article.assistant .note >> text={name} is being loaded")
    page.wait_for_function("() => document.getElementById('model').options[0].text.endsWith('(loading …)')")
    page.wait_for_function("(name) => document.getElementById('model').options[0].text === name", arg=name)
    page.wait_for_selector("article.assistant .note >> text=Waiting for the first token")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    for route in held:
        route.abort("connectionrefused")
    wait_state(page, "failed")
    page.click("text=Retry when the server is back")
    wait_state(page, "lost")
    assert "tries again until it does" in page.locator("article.assistant .note").inner_text()
    page.unroute("**/v1/chat/completions")
    wait_state(page, "done")


def test_a_cut_answer_goes_on_and_a_full_context_is_shown_and_emptied(show, real_server):
    page = show(real_server.url)
    bodies = sent_bodies(page)
    set_fields(page, temperature=0, max_new_tokens=12)
    body = {"messages": chat_turns(LIST), "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    told = httpx.post(f"{real_server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
    say(page, LIST)
    page.get_by_role("button", name="Continue this answer").press("Enter")
    page.wait_for_selector("article.assistant .switcher:has-text('2 / 2')")
    page.wait_for_selector("#stop", state="hidden")
    assert page.evaluate("() => document.activeElement.id") == "stage"
    page.click("#view-tokens")
    assert "".join(tokens(page)).replace("↵", "") == told["choices"][0]["message"]["content"]
    page.click("#view-text")
    usage = told["usage"]
    assert page.locator("#context-text").inner_text() == f"{usage['total_tokens']} of 8,192 tokens"
    assert page.locator("#context-meter").evaluate("one => [one.value, one.max]") == [usage["total_tokens"], 8192]

    page.click("#new-chat")
    constrain(page, "regex", "Rivers[^#]*")
    set_fields(page, close_early=False)
    page.wait_for_selector("#constraint-verdict.good")
    say(page, LIST)
    (before,) = answers(page)
    page.get_by_role("button", name="Continue this answer").click()
    page.wait_for_selector("article.assistant .switcher:has-text('2 / 2')")
    page.wait_for_selector("#stop", state="hidden")
    assert (bodies[-1]["regex"], bodies[-1]["max_new_tokens"]) == ("Rivers[^#]*", 24)
    assert answers(page)[0].startswith(before)
    assert len(answers(page)[0]) > len(before) > len("Rivers")

    def small(route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"context_length": usage["total_tokens"] + 40})

    page.route("**/model_info*", small)
    page.reload()
    page.wait_for_selector("body[data-ready]")
    page.locator("#conversations .conversation", has_text=LIST).last.click()
    assert not page.locator("#drop").is_visible()
    set_fields(page, max_new_tokens=12)
    say(page, "Name three more, and say in which countries they are.")
    page.click("#drop")
    assert page.locator("article.unsent").count() == 2
    assert "does not get the turns above" in page.locator("article.user .beginning").inner_text()
    say(page, "Which is the longest?")
    assert bodies[-1]["messages"][0]["content"].startswith("Name three more")
    page.click("#view-tokens")
    page.locator("article.assistant").first.locator(".token[role=option]").nth(15).click()
    page.wait_for_selector(".explanation .stage")
    assert page.locator(".note.bad").count() == 0
    page.click("text=Send them again")
    assert page.locator("article.unsent").count() == 0
    say(page, "And the shortest?")
    assert bodies[-1]["messages"][0]["content"] == LIST
    assert tokens(page)


SAMPLES = {
    "python": ('# a "note"\ndef f(x):\n    return "a\\"b" + 0x1F  # 2', {"comment", "keyword", "string", "number"}),
    "js": ("/* 1 */ const a = `x ${1}`; // end", {"comment", "keyword", "string"}),
    "sql": ("SELECT 1 -- one\nFROM t", {"comment", "keyword", "number"}),
    "html": ('<p class="a">1 < 2</p><!-- c -->', {"comment", "keyword", "string", "number"}),
    "json": ('{"a": [1.5e3, true]}', {"string", "number", "keyword"}),
    "rust": ("fn f<'a>(x: &'a str) -> &'a str { x }", {"keyword", "string"}),
    "brainfuck": ("+ 1 'a'", set()),
    "": ("def f(): 1", set()),
}
PURE = """async (samples) => {
    const { pieces } = await import("./playground/code.js");
    const { contextUse, dropPoint } = await import("./playground/context.js");
    const coloured = Object.fromEntries(Object.entries(samples).map(([name, text]) => [name, pieces(text, name)]));
    const said = (id, text) => ({id, role: "user", text});
    const answered = (id, prompt, completion) => (
        {id, role: "assistant", text: "x".repeat(400), made: {from: ""}, figures: {prompt, completion}});
    const nodes = [
        said("a", "x".repeat(400)), answered("b", 100, 100), said("c", "x".repeat(400)), answered("d", 300, 100)];
    const use = [
        contextUse(nodes, ""), contextUse(nodes, "", "x".repeat(40)), contextUse(nodes, "c"), contextUse([], ""),
        contextUse(nodes.slice(0, 3), "nowhere")];
    const dropped = [[800, 400], [400, 400], [8, 1]].map(([used, length]) => dropPoint(nodes, "", used, length)?.id);
    const holder = document.createElement("div");
    (await import("./playground/markdown.js")).showMarkdown(holder, "```python\\nx = 1 # <b>\\n```");
    const copied = [];
    Object.defineProperty(navigator, "clipboard", {value: {writeText: async (text) => copied.push(text)}});
    holder.querySelector(".code button").click();
    copied.push(holder.querySelector(".code-comment").textContent);
    return {copied, coloured, use, dropped: [...dropped, dropPoint(nodes, "c", 400, 1), dropPoint([], "", 0, 1)]};
}"""


def test_code_is_coloured_and_the_context_is_counted_in_tokens(show, live):
    page = show(live.url)
    found = page.evaluate(PURE, {name: text for name, (text, _) in SAMPLES.items()})
    for name, (text, kinds) in SAMPLES.items():
        pieces = found["coloured"][name]
        assert "".join(piece for _, piece in pieces) == text
        assert {kind for kind, _ in pieces} - {""} == kinds, name
    assert ["comment", '# a "note"'] in found["coloured"]["python"]
    assert ["string", '"a\\"b"'] in found["coloured"]["python"]
    assert [(one["used"], one["isEstimate"]) for one in found["use"]] == [
        (400, False),
        (410, True),
        (200, True),
        (0, False),
        (300, True),
    ]
    assert found["copied"] == ["x = 1 # <b>\n", "# <b>"]
    assert found["dropped"] == ["c", "c", "c", None, None]


SLOWER_THAN_CODE = """async (texts) => {
    const { pieces } = await import("./playground/code.js");
    const fastest = (text) => Math.min(...[1, 2, 3, 4, 5].map(() => {
        const start = performance.now();
        pieces(text, "js");
        return performance.now() - start;
    }));
    const ordinary = fastest('const a = f("b", 1); // c\\n'.repeat(740));
    return Object.fromEntries(texts.map((text) => [text, fastest(text.repeat(20_000 / text.length)) / ordinary]));
}"""


def test_quotes_that_no_other_closes_are_coloured_about_as_fast_as_ordinary_code(show, live):
    """A search for the end of each of them took 100 times as long."""
    slower = show(live.url).evaluate(SLOWER_THAN_CODE, ['\\"', "\\'", "\\`", "'a\\\"`\\", '"', "/*"])
    assert {text: times for text, times in slower.items() if times > 25} == {}


VERSIONS = """async () => {
    const { add, create, said, select, sent, shown } = await import("./playground/conversation.js");
    const conversation = create({});
    const texts = () => sent(shown(conversation), conversation.from).map((node) => node.text);
    const first = add(conversation, null, {role: "user", text: "a"});
    const old = add(conversation, first, {role: "user", text: "b"});
    conversation.from = old.id;
    add(conversation, first, {role: "user", text: "c"});
    const found = [texts()];
    select(conversation, old);
    found.push(texts());
    add(conversation, old, {role: "user", text: "d"});
    return [...found, texts(), said({files: [{name: "a", text: "` ".repeat(500000)}], text: ""}).length];
}"""


def test_turns_that_are_left_out_stay_so_in_other_versions_and_a_file_may_have_any_number_of_marks(show, live):
    assert show(live.url).evaluate(VERSIONS) == [["c"], ["b"], ["b", "d"], 1_000_011]


def test_a_file_is_added_to_the_draft_for_which_it_was_chosen(show, live):
    """Files are read while the page goes on: the conversation may be another one, or the draft sent, when they are."""
    page = show(live.url)
    page.click("#new-completion")
    page.fill("#message", "Once ")
    page.evaluate(f"(file) => {{ ({ATTACH})(file); document.getElementById('new-chat').click(); }}", ["a.md", [97]])
    page.wait_for_function("() => document.getElementById('message').placeholder === 'Message'")
    page.evaluate(ATTACH, ["b.md", [98]])
    page.wait_for_selector(".preview .file >> text=b.md")
    assert page.input_value("#message") == ""
    page.locator("#conversations .conversation", has_text="New completion").click()
    assert page.input_value("#message") == "Once a"
    page.evaluate(ATTACH, ["a.png", [0], "image/png"])
    page.wait_for_selector(".toast >> text=A completion takes only text")
    assert page.locator(".preview").count() == 0


def test_what_is_typed_while_the_page_loads_does_not_replace_a_draft(show, live):
    page = show(live.url)
    page.fill("#message", "Once upon")
    page.evaluate("() => dispatchEvent(new Event('pagehide'))")
    held: list[Any] = []
    page.route("**/v1/models", lambda route: held.append(route))
    with page.expect_request("**/v1/models"):
        page.reload()
    page.fill("#message", "a time")
    for route in held:
        route.continue_()
    page.wait_for_selector("body[data-ready]")
    assert page.input_value("#message") == "Once upon\na time"
