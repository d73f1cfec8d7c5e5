"""The playground with a real server: what is asked, what is shown, and that the server's API says the same."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from driving import answers, chat_turns, constrain, say, set_fields, tokens
from timeouts import PATIENCE_S

QUESTION = "What is the capital of France?"
LIST = "Name three rivers of Europe."


@pytest.fixture
def page(show, real_server):
    opened = show(real_server.url)
    set_fields(opened, temperature=0, max_new_tokens=24)
    return opened


def chat(server, messages, **fields) -> dict:
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "return_token_ids": True} | fields
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()["choices"][0]


def answer_over_http(server, *texts: str, **fields) -> str:
    return chat(server, chat_turns(*texts), **fields)["message"]["content"].strip()


def test_a_conversation_is_answered_edited_gone_on_with_and_there_after_a_reload(page, real_server):
    asked, refused = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: refused.append(message.text) if message.type == "error" else None)
    say(page, QUESTION)
    assert answers(page) == [answer_over_http(real_server, QUESTION)]
    figures = page.locator("article.assistant .figures").inner_text()
    for shown in (r"first token\s+[\d.]+ m?s", r"speed\s+[\d.]+ tok/s", r"answer\s+\d+ tok", r"from cache\s+\d+ tok"):
        assert re.search(shown, figures), figures
    page.click("article.user >> text=Edit")
    page.fill("article.user textarea", "What is the capital of Italy?")
    page.click("text=Send as a new version")
    page.wait_for_selector("#stop", state="hidden")
    assert answers(page) == [answer_over_http(real_server, "What is the capital of Italy?")]
    assert page.locator("article.user .switcher").text_content() == "‹2 / 2›"
    page.click("[aria-label='Previous version']")
    assert page.locator("article.user .body").text_content() == QUESTION
    page.click("text=Regenerate")
    page.wait_for_selector("article.assistant .switcher:has-text('2 / 2')")
    page.wait_for_selector("#stop", state="hidden")
    say(page, "And of Italy?")
    first, second = answers(page)
    assert second == answer_over_http(real_server, QUESTION, first, "And of Italy?")
    page.wait_for_function("() => document.querySelectorAll('#conversations .conversation').length === 1")
    page.evaluate("() => dispatchEvent(new Event('pagehide'))")
    page.reload()
    page.wait_for_selector("article.assistant >> nth=1")
    assert answers(page) == [first, second]
    assert len(asked) > 20
    assert [url for url in asked if not url.startswith(f"{real_server.url}/")] == []
    assert refused == []


def test_the_speed_is_the_server_s_even_if_the_page_reads_all_tokens_at_once(page, real_server):
    told = []

    def held(route):
        """The whole stream in one piece, as a page gets it that was busy meanwhile."""
        answer = route.fetch()
        told.extend(json.loads(line[6:]) for line in answer.text().splitlines() if line.startswith("data: {"))
        route.fulfill(response=answer)

    page.route("**/v1/chat/completions", held)
    say(page, LIST)
    (meta,) = [choice["meta_info"] for event in told for choice in event["choices"] if "meta_info" in choice]
    figures = page.locator("article.assistant .figures").inner_text()
    assert re.search(r"speed\s+([\d.]+) tok/s", figures)[1] == f"{meta['decode_throughput']:.1f}"
    assert (
        0 < meta["decode_throughput"] < meta["completion_tokens"] / (meta["e2e_latency"] - meta["first_token_latency"])
    )


def test_tokens_are_those_of_the_api_and_another_one_branches_with_the_same_prefix(page, real_server):
    sent = []
    page.on("request", lambda request: sent.append(request) if request.url.endswith("/chat/completions") else None)
    say(page, LIST)
    page.click("#view-tokens")
    told = chat(real_server, chat_turns(LIST), logprobs=True)
    assert [text.replace("↵", "") for text in tokens(page)] == [
        one["token"].replace("\n", "") for one in told["logprobs"]["content"]
    ]
    assert all("%" in one.get_attribute("title") for one in page.locator(".token[role=option]").all())
    before = tokens(page)
    page.locator(".token[role=option]").nth(5).click()
    page.wait_for_selector(".explanation .stage")
    assert page.locator(".candidates thead th").all_inner_texts()[:2] == ["token", "1 model"]
    assert page.locator(".candidates tbody tr").count() >= 8
    (chosen,) = page.locator(".candidates tbody tr.chosen").all()
    whole = float(chosen.locator("td").first.inner_text().split()[0])
    assert whole == pytest.approx(100 * math.exp(told["logprobs"]["content"][5]["logprob"]), abs=0.06)
    assert page.locator(".stage").all_inner_texts()[-1].startswith("The temperature is 0")
    page.locator(".take:not(:disabled)").first.click()
    page.wait_for_selector("article.assistant .switcher >> text=2 / 2")
    page.wait_for_selector("#stop", state="hidden")
    assert "Taken by you" in page.locator("#panel-token").inner_text()
    after = tokens(page)
    assert after[:5] == before[:5]
    assert after[5] != before[5]
    assert page.locator(".token.kept").count() == 5
    assert page.locator(".token.taken").count() == 1
    body = json.loads(sent[-1].post_data)
    assert body["input_ids"][-6:-1] == told["token_ids"][:5]
    assert "messages" not in body
    prompt = page.locator("details.prompt summary").inner_text()
    cached, total = map(int, re.search(r"(\d+) of (\d+) tokens from the prefix cache", prompt).groups())
    assert 0 < cached < total == len(body["input_ids"])
    text = page.locator("article.assistant .tokens").first.inner_text()
    same = {"input_ids": body["input_ids"], "temperature": 0, "max_tokens": 24}
    answer = httpx.post(f"{real_server.url}/v1/chat/completions", json=same, timeout=PATIENCE_S).json()
    assert answer["choices"][0]["message"]["content"].strip()[:40].split("\n")[0] in text


def test_an_answer_without_explanations_is_explained_by_asking_again_with_its_seed(page, real_server):
    fields = {"temperature": 1.2, "top_p": 0.8, "max_new_tokens": 12, "sampling_seed": 7}
    page.uncheck("#explain")
    set_fields(page, **fields)
    body = {"messages": chat_turns(LIST), "explain": True} | fields
    told = httpx.post(f"{real_server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
    explained = told["choices"][0]["explanations"]
    index = max(range(len(explained)), key=lambda place: len(order_of_draw(explained[place])))
    say(page, LIST)
    page.click("#view-tokens")
    page.locator(".token[role=option]").nth(index).click()
    page.wait_for_selector(".explanation .draw-line")
    assert page.locator(".note.bad").count() == 0
    chosen = page.locator(".chosen-token").inner_text()
    assert chosen.replace("·", " ").strip("↵ ") == tokens(page)[index].strip("↵\n ")
    assert order_of_draw(explained[index]) != sorted(order_of_draw(explained[index]))  # it is not the order of chances
    is_the_table_of(page, explained[index])


def order_of_draw(told: dict) -> list[int]:
    """Returns the places of the candidates that were drawn from, in the order of their shares. The best has place 0."""
    starts = told["stages"][-1]["starts"]
    return sorted((place for place, start in enumerate(starts) if start is not None), key=starts.__getitem__)


def is_the_table_of(page, told: dict) -> None:
    """Check the table of candidates against the API's explanation: its rows in the order of the draw, its figures."""
    *stages, draw = told["stages"]
    assert [stage["stage"] for stage in stages] == ["model", "temperature", "top_p"]
    heads = [text.replace("\u200b", "") for text in page.locator(".candidates thead th").all_inner_texts()]
    assert heads == ["token", "1 model", "2 temperature 1.2", "3 top_p 0.8", "4 draw"]
    places = sorted(
        range(len(told["candidates"])),
        key=lambda place: (
            2 if (start := draw["starts"][place]) is None else start,
            -stages[0]["probabilities"][place],
        ),
    )
    rows = page.locator(".candidates tbody tr").all()
    assert len(rows) == len(places)
    for row, place in zip(rows, places, strict=True):
        *figures, share = row.locator("td").all_text_contents()
        for stage, figure in zip(stages, figures, strict=True):
            p = stage["probabilities"][place]
            if figure == "cut":
                assert p == 0
            else:
                assert float(figure.split()[0]) == pytest.approx(100 * p, rel=0.06, abs=0.06)
        is_chosen = told["candidates"][place]["token_id"] == told["token_id"]
        assert ("chosen" in (row.get_attribute("class") or "")) is is_chosen
        if draw["starts"][place] is None:
            assert share == ""
        else:
            assert share.split(",")[0] == f"{draw['starts'][place]:.3f}–{draw['ends'][place]:.3f}"
    sentences = page.locator(".sentences .stage").all_inner_texts()
    assert len(sentences) == 4
    assert sentences[1].startswith("Temperature 1.2 made the best token less likely")
    assert sentences[2].startswith(f"top_p 0.8 kept {stages[2]['kept']} token")
    assert f"{told['random']:.4f}" in sentences[3]
    assert "as a share of all tokens that are left" in page.locator(".explanation .base").inner_text()
    assert page.locator(".explanation .legend").is_visible()


def test_an_adapter_answers_and_its_branch_stays_in_its_conversation(page, real_server):
    asked, held = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.fill("#system", "Answer in capital letters only.")
    page.select_option("#model", "whisper")
    page.wait_for_function("() => document.getElementById('panel-settings').childElementCount > 0")
    say(page, LIST)
    said = [{"role": "system", "content": "Answer in capital letters only."}, *chat_turns(LIST)]
    assert answers(page) == [chat(real_server, said, model="whisper")["message"]["content"].strip()]
    assert any(url.endswith("/model_info?model=whisper") for url in asked)
    page.click("#view-tokens")
    page.locator(".token[role=option]").nth(3).click()
    page.wait_for_selector(".explanation .stage")
    page.route("**/v1/detokenize", lambda route: held.append(route))
    with page.expect_request("**/v1/detokenize"):
        page.locator(".take:not(:disabled)").first.dblclick()
    page.click("#new-chat")
    assert page.locator("article").count() == 0
    assert [json.loads(route.request.post_data)["model"] for route in held] == ["whisper"]
    with page.expect_response("**/v1/chat/completions"):
        held[0].continue_()
    page.wait_for_selector("#stop", state="hidden")
    assert page.locator("article").count() == 0
    page.click(f"#conversations .conversation:has-text('{LIST}')")
    page.wait_for_selector("article.assistant .switcher:has-text('2 / 2')")
    assert page.locator(".token.taken").count() == 1


def test_a_schema_is_judged_while_it_is_written_and_forced_tokens_are_marked(page):
    constrain(page, "json_schema", '{"type": "object",\n "properties": {"name" {}}}')
    page.wait_for_selector("#constraint-verdict.bad >> text=line 2")
    assert page.locator(".gutter .bad").inner_text() == "2"
    page.fill("#constraint-text", '{"type": "objec"}')
    page.wait_for_selector("#constraint-verdict.bad >> text=must be one or a list of")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}},
        "required": ["name"],
        "additionalProperties": False,
    }
    page.fill("#constraint-text", json.dumps(schema))
    page.wait_for_selector("#constraint-verdict.good")
    for pattern, verdict, said in (
        ("(a", "bad", "a group is not closed"),
        (r"^(a+)\1$", "warn", "pattern at the root"),
    ):
        page.fill("#constraint-text", json.dumps({"type": "string", "pattern": pattern}))
        page.wait_for_selector(f"#constraint-verdict.{verdict} >> text={said}")
    page.fill("#constraint-text", json.dumps(schema))
    page.wait_for_selector("#constraint-verdict.good")
    say(page, "Ada")
    assert set(json.loads(answers(page)[0])) == {"name"}
    page.click("#view-tokens")
    forced = page.locator(".token.forced").first
    assert forced.inner_text() == '{"'
    assert "%" not in forced.get_attribute("title")
    forced.click()
    page.wait_for_selector("#panel-token >> text=Forced: the constraint left no other token.")
    assert "%" not in page.locator("#panel-token").inner_text()


def test_the_form_has_every_parameter_and_says_at_the_field_what_the_server_refuses(page, real_server):
    declared = httpx.get(f"{real_server.url}/openapi.json").json()["components"]["schemas"]["SamplingParams"]
    boxed = {"json_schema", "regex", "ebnf", "structural_tag", "choice", "dtype"}
    options = set(page.locator("#constraint-kind option").evaluate_all("all => all.map(one => one.value)")) - {""}
    assert options == boxed
    abouts = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('[id]')].map((one) => [one.id, one.textContent]))"
    )
    for name, schema in declared["properties"].items():
        if name not in boxed and name != "seed":
            assert schema["description"].replace("`", "") in abouts[f"field-{name}-about"], name
            assert "x-group" in schema, name
    assert "≤ 1" in abouts["field-top_p-about"]
    first = page.locator("#fields details").first
    assert first.locator("label").first.inner_text() == "Temperature temperature"
    assert first.locator(".field").count() == 5
    slider = first.locator("[aria-label='Temperature, slider']")
    slider.evaluate("one => { one.value = 1.5; one.dispatchEvent(new Event('input')); }")
    assert page.input_value("#field-temperature") == "1.5"
    kinds = page.locator("#constraint-kind option").all_text_contents()
    assert {"JSON that follows a schema", "Text that matches a regular expression"} <= set(kinds)
    grey = """() => Object.fromEntries(
        [...document.querySelectorAll('#fields [placeholder]')].map((one) => [one.name, one.placeholder]))"""
    shown = page.evaluate(grey)
    assert shown["max_new_tokens"] == "what the context leaves"
    assert [name for name, text in shown.items() if text == "random"] == ["sampling_seed"]
    page.click("#new-completion")
    completion = httpx.get(f"{real_server.url}/openapi.json").json()["components"]["schemas"]["CompletionBody"]
    assert page.evaluate(grey)["max_new_tokens"] == str(completion["properties"]["max_tokens"]["default"])
    page.click("#new-chat")
    set_fields(page, temperature=0, max_new_tokens=24)
    set_fields(page, top_p=3)
    assert "must be > 0, ≤ 1" in page.locator(".field:has(#field-top_p) .fault").inner_text()
    say(page, QUESTION, wait=False)
    page.wait_for_selector(".toast >> text=Not sent: top_p must be")
    assert page.locator("article.user").count() == 0
    set_fields(page, top_p="")
    set_fields(page, min_new_tokens=25)
    say(page, QUESTION)
    page.wait_for_selector("article.assistant .note.bad")
    assert (
        "must be at most max_new_tokens (24)" in page.locator(".field:has(#field-min_new_tokens) .fault").inner_text()
    )
    set_fields(page, min_new_tokens="")
    page.click("text=Try again")
    page.wait_for_selector("article.assistant[data-state=done]")


def test_tools_are_called_and_given_results(page):
    page.click("summary:has-text('Tools')")
    page.locator("details:has(#tools) >> text=Example").click()
    page.select_option("#tool-choice", "required")
    set_fields(page, max_new_tokens=60)
    say(page, "What is the weather in Paris?")
    page.wait_for_selector("section.call >> text=weather")
    calls = [json.loads(text) for text in page.locator("section.call pre").all_text_contents()]
    assert [set(arguments) for arguments in calls] == [{"city"}] * len(calls)
    page.select_option("#tool-choice", "none")
    for _ in calls:
        page.locator("section.call textarea").first.fill("21 degrees and sunny")
        page.locator("text=Give the result").first.click()
    page.wait_for_selector("#stop", state="hidden")
    assert page.locator("article.tool .body").all_text_contents() == ["21 degrees and sunny"] * len(calls)
    assert page.locator("article.assistant[data-state=done]").count() == 2


def drop_a_file(page) -> None:
    page.evaluate("""() => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(4)], "a.png", {type: "image/png"}));
        document.getElementById("main").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
    }""")


def test_choices_are_versions_a_completion_continues_and_settings_stand_side_by_side(page, real_server):
    sent = []
    set_fields(page, n=2, temperature=1, max_new_tokens=8)
    say(page, LIST)
    assert "1 / 2" in page.locator("article.assistant .switcher").text_content()
    page.click("[aria-label='Next version']")
    page.wait_for_selector("article.assistant .switcher:has-text('2 / 2')")
    assert page.locator("details.reasoning").count() == 0
    drop_a_file(page)
    page.wait_for_selector(".toast >> text=does not accept pictures")

    page.on("request", lambda request: sent.append(request) if request.url.endswith("/chat/completions") else None)
    set_fields(page, n=2)
    page.click("#compare")
    page.fill(".compare textarea", LIST)
    page.click("text=Add a column")
    assert page.locator(".column").count() == 3
    page.click("text=Run all")
    page.wait_for_selector(".compare button:has-text('Stop'):disabled")
    assert [bool(text.strip()) for text in page.locator(".column .output").all_inner_texts()] == [True] * 3
    assert [json.loads(request.post_data)["n"] for request in sent] == [1] * 3
    page.locator("text=Use these settings").nth(1).click()
    assert page.input_value("#field-temperature") == "0.7"

    set_fields(page, n="", temperature=0, top_p="", max_new_tokens=24)
    page.click("#new-completion")
    say(page, "The capital of France is")
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 24}
    told = httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    assert answers(page)[0].split() == told["choices"][0]["text"].split()


def test_conversations_are_found_exported_and_read_back(page, tmp_path):
    set_fields(page, max_new_tokens=4)
    say(page, QUESTION)
    page.click("#new-chat")
    say(page, "Say moo.")
    page.fill("#search", "capital france")
    assert page.locator("#conversations .name").all_text_contents() == [QUESTION]
    page.fill("#search", "")
    with page.expect_download() as found:
        page.click("#export-all")
    path = tmp_path / "all.json"
    found.value.save_as(path)
    assert len(json.loads(path.read_text())["conversations"]) == 2
    with page.expect_file_chooser() as chooser:
        page.click("#import")
    chooser.value.set_files(path)
    page.wait_for_function("() => document.querySelectorAll('#conversations .conversation').length === 4")


def test_a_request_as_code_runs_and_gives_the_same_answer(page, tmp_path):
    page.fill("#system", "You're brief.")
    set_fields(page, repetition_penalty=1.1)
    say(page, QUESTION)
    page.click("text=Code")
    said = {}
    for library in ("curl", "Python", "openai", "anthropic", "ollama"):
        page.click(f"dialog [role=tab]:has-text('{library}')")
        program = page.locator("#program").inner_text()
        (script := Path(tmp_path / f"{library}_program")).write_text(program)
        command = ["bash" if library == "curl" else sys.executable, str(script)]
        said[library] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    said["curl"] = json.loads(said["curl"])["choices"][0]["message"]["content"]
    assert {library: text.split() for library, text in said.items()} == dict.fromkeys(said, answers(page)[0].split())
