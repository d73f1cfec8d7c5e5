"""Responses that are kept: continued, found again, deleted, each client's apart; OpenAI's own client reads them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import Any

import httpx
import openai
import pydantic
import pytest
from app_under_test import App
from openai.types.conversations import Conversation, ConversationItem
from openai.types.responses import Response, ResponseItem
from openai_judge import make_client
from served_app import ServedApp

from tureen.errors import RequestFailed
from tureen.requests.generation import Run

PATH, CONVERSATIONS = "/v1/responses", "/v1/conversations"
TEMPLATE = (
    "{# <tool_call> #}{{ 'T' if tools }}say:{% for message in messages %}{{ message['role'][0] }}"
    "{{ message['content'] | trim }}{{ message.get('tool_calls', '') | length }};{% endfor %}"
)
"""The model says all that it was sent: the first letter of each role, the text, how many calls."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}

ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseItem)
CONVERSATION_ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ConversationItem)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "all.jinja").write_text(TEMPLATE)
    (folder / "keys").write_text("ada KEY-ADA\nbob KEY-BOB\n")
    (folder / "keys").chmod(0o600)
    return {"chat_template": str(folder / "all.jinja"), "folder": str(folder)}


def make_app(settings: dict[str, str], name: str, **more: Any) -> App:
    folder = settings["folder"]
    store = more.pop("responses_store", f"{folder}/{name}.db")
    return App(chat_template=settings["chat_template"], responses_store=store, **more)


@pytest.fixture(scope="module")
def app(settings):
    with make_app(settings, "app") as running:
        yield running


@pytest.fixture(scope="module")
def bare(settings):
    """A server that keeps nothing."""
    with App(chat_template=settings["chat_template"]) as running:
        yield running


def ask(app: App, said: Any, status: int = 200, **body: Any) -> dict[str, Any]:
    response = app.post(PATH, input=said, **body)
    assert response.status_code == status, response.text
    if status == 200:
        Response.model_validate(response.json(), strict=True, extra="forbid")
    return response.json()


def get(app: App, path: str, status: int = 200, method: str = "GET", **how: Any) -> dict[str, Any]:
    response = app.request(method, path, **how)
    assert response.status_code == status, response.text
    return response.json()


def text(answer: dict[str, Any]) -> str:
    return answer["output"][-1]["content"][0]["text"]


def test_a_response_is_kept_and_found_again(app: App):
    answer = ask(app, "a")
    assert answer["id"].startswith("resp_")
    assert get(app, f"{PATH}/{answer['id']}") == answer


def test_a_response_continues_another_with_all_before_it(app: App):
    first = ask(app, "one", instructions="be good")
    second = ask(app, "two", previous_response_id=first["id"])
    assert text(second) == f"uone0;a{text(first)}0;utwo0;", "instructions are those of each request"
    assert second["previous_response_id"] == first["id"]
    third = ask(app, [{"role": "user", "content": "three"}], previous_response_id=second["id"])
    assert text(third) == f"{text(second)}a{text(second)}0;uthree0;"
    other = ask(app, "other", previous_response_id=first["id"], instructions="be bad")
    assert text(other) == f"sbe bad0;uone0;a{text(first)}0;uother0;"


def test_it_is_the_same_as_sending_everything(app: App):
    first = ask(app, "one")
    kept = ask(app, "two", previous_response_id=first["id"])
    whole = ask(app, [{"role": "user", "content": "one"}, *first["output"], {"role": "user", "content": "two"}])
    assert text(kept) == text(whole)
    assert kept["usage"] == whole["usage"] | {
        "input_tokens_details": kept["usage"]["input_tokens_details"],
    }


def test_calls_and_their_results_are_continued(app: App, settings):
    template = f"{settings['folder']}/call.jinja"
    with open(template, "w") as file:
        file.write("{# <tool_call> #}{{ '' if tools }}{{ messages[-1]['content'] }}")
    with App(chat_template=template, responses_store=f"{settings['folder']}/call.db") as calling:
        asked = ask(calling, f"say:{CALL}", tools=[WEATHER])
        [call] = asked["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "say:rain"}
        after = ask(calling, [result], previous_response_id=asked["id"], tools=[WEATHER])
        assert text(after) == "rain"
        listed = get(calling, f"{PATH}/{after['id']}/input_items?order=asc")["data"]
    assert [item["type"] for item in listed] == ["message", "function_call", "function_call_output"]
    for item in listed:
        ITEM.validate_python(item, strict=True, extra="forbid")


def test_what_is_not_to_be_kept_is_not(app: App):
    first = ask(app, "one")
    answer = ask(app, "two", previous_response_id=first["id"], store=False)
    assert text(answer).endswith("utwo0;")
    assert get(app, f"{PATH}/{answer['id']}", 404)["error"]["code"] == "response_not_found"
    ask(app, "three", 404, previous_response_id=answer["id"])


def test_the_input_of_a_response_is_listed_in_pages(app: App):
    first = ask(app, [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}])
    last = ask(app, "next", previous_response_id=first["id"])
    path = f"{PATH}/{last['id']}/input_items"
    whole = get(app, path)
    assert (whole["object"], whole["has_more"]) == ("list", False)
    assert [item["role"] for item in whole["data"]] == ["user", "assistant", "user", "developer"]
    for item in whole["data"]:
        ITEM.validate_python(item, strict=True, extra="forbid")
    forward = get(app, f"{path}?order=asc")["data"]
    assert forward == whole["data"][::-1]
    seen, after = [], ""
    while True:
        page = get(app, f"{path}?order=asc&limit=1{after}")
        seen += page["data"]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert seen == forward
    for query, named in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("foo=1", "the query.foo")):
        assert get(app, f"{path}?{query}", 400)["error"]["param"] == named
    assert get(app, f"{path}?after=nobody", 404)["error"]["param"] == "after"


def test_a_deleted_response_is_gone(app: App):
    first = ask(app, "one")
    second = ask(app, "two", previous_response_id=first["id"])
    assert get(app, f"{PATH}/{first['id']}", method="DELETE") == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    for method in ("GET", "DELETE"):
        assert get(app, f"{PATH}/{first['id']}", 404, method)["error"]["param"] == "response_id"
    get(app, f"{PATH}/{first['id']}/cancel", 404, "POST")
    refused = ask(app, "x", 404, previous_response_id=first["id"])["error"]
    assert (refused["param"], refused["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "was deleted" in ask(app, "x", 404, previous_response_id=second["id"])["error"]["message"]


def test_clients_keep_apart(settings):
    with make_app(settings, "keys", api_key_file=f"{settings['folder']}/keys") as app:

        def as_client(key: str, method: str, path: str, **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return app.request(method, path, headers=headers, json=body or None)

        mine = as_client("KEY-ADA", "POST", PATH, input="secret").json()
        conversation = as_client("KEY-ADA", "POST", CONVERSATIONS, metadata={"a": "b"}).json()
        for method, path in (
            ("GET", f"{PATH}/{mine['id']}"),
            ("GET", f"{PATH}/{mine['id']}?stream=true"),
            ("DELETE", f"{PATH}/{mine['id']}"),
            ("POST", f"{PATH}/{mine['id']}/cancel"),
            ("GET", f"{PATH}/{mine['id']}/input_items"),
            ("GET", f"{CONVERSATIONS}/{conversation['id']}"),
            ("DELETE", f"{CONVERSATIONS}/{conversation['id']}"),
            ("GET", f"{CONVERSATIONS}/{conversation['id']}/items"),
        ):
            assert as_client("KEY-BOB", method, path).status_code == 404, path
        for field, name in (("previous_response_id", mine["id"]), ("conversation", conversation["id"])):
            refused = as_client("KEY-BOB", "POST", PATH, input="x", **{field: name})
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, field)
        assert as_client("KEY-ADA", "GET", f"{PATH}/{mine['id']}").json() == mine


def test_a_conversation_grows_with_its_responses(app: App):
    made = app.post(CONVERSATIONS, items=[{"role": "system", "content": "be good"}], metadata={"topic": "x"}).json()
    Conversation.model_validate(made, strict=True, extra="forbid")
    path = f"{CONVERSATIONS}/{made['id']}"
    assert get(app, path) == made
    first = ask(app, "one", conversation=made["id"])
    assert first["conversation"] == {"id": made["id"]}
    second = ask(app, "two", conversation={"id": made["id"]})
    assert text(second) == f"sbe good0;uone0;a{text(first)}0;utwo0;"
    items = get(app, f"{path}/items?order=asc")["data"]
    assert [item["role"] for item in items] == ["system", "user", "assistant", "user", "assistant"]
    assert items[2] == first["output"][0]
    for item in items:
        CONVERSATION_ITEM.validate_python(item, strict=True, extra="forbid")
    assert get(app, f"{path}/items/{items[1]['id']}") == items[1]
    get(app, f"{path}/items/{items[1]['id']}", method="DELETE")
    added = app.post(f"{path}/items", items=[{"role": "user", "content": "three"}]).json()
    assert added["data"][0]["content"] == [{"type": "input_text", "text": "three"}]
    assert text(ask(app, "four", conversation=made["id"])).startswith(f"sbe good0;a{text(first)}0;utwo0;")
    assert app.post(path, metadata={"topic": "y"}).json() == made | {"metadata": {"topic": "y"}}
    assert get(app, path, method="DELETE")["deleted"] is True
    assert get(app, f"{path}/items", 404)["error"]["code"] == "conversation_not_found"
    assert ask(app, "five", 404, conversation=made["id"])["error"]["param"] == "conversation"


def test_a_response_of_a_conversation_is_continued_as_the_conversation_was(app: App):
    conversation = app.post(CONVERSATIONS).json()["id"]
    first = ask(app, "one", conversation=conversation)
    ask(app, "two", conversation=conversation)
    assert text(ask(app, "else", previous_response_id=first["id"])) == f"uone0;a{text(first)}0;uelse0;"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CONVERSATIONS, {"items": [{"role": "robot", "content": "a"}]}, "items[0].role"),
        (CONVERSATIONS, {"items": [{"type": "x"}]}, "items[0].type"),
        (CONVERSATIONS, {"items": [{"role": "user", "content": "a"}] * 21}, "items"),
        (CONVERSATIONS, {"items": 5}, "items"),
        (CONVERSATIONS, {"metadata": {"a": 1}}, "metadata['a']"),
        (CONVERSATIONS, {"item": []}, "item"),
        (f"{CONVERSATIONS}/x", {}, "metadata"),
        (f"{CONVERSATIONS}/x/items", {"items": []}, "items"),
    ],
)
def test_a_conversation_of_a_wrong_form_is_refused_by_name(app: App, path, body, named):
    response = app.post(path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == named


def test_fields_that_exclude_each_other_are_refused(app: App):
    conversation = app.post(CONVERSATIONS).json()["id"]
    first = ask(app, "one")["id"]
    both = {"previous_response_id": first, "conversation": conversation}
    assert ask(app, "x", 400, **both)["error"]["param"] == "conversation"
    for field in ({"background": True}, {"conversation": conversation}):
        refused = ask(app, "x", 400, store=False, **field)["error"]
        assert refused["param"] == next(iter(field))
        assert "store: true" in refused["message"]


def test_a_name_that_the_client_chose_is_taken_once(app: App):
    ask(app, "x", rid="mine")
    assert get(app, f"{PATH}/mine")["id"] == "mine"
    assert ask(app, "x", 400, rid="mine")["error"]["code"] == "duplicate_rid"


def test_a_stream_is_kept_when_its_last_event_is_sent(app: App):
    first = ask(app, "one")
    response = app.post(PATH, input="two", previous_response_id=first["id"], stream=True)
    last = response.text.removesuffix("\n\n").split("\n\n")[-1]
    name = pydantic.TypeAdapter(dict).validate_json(last.split("data: ")[1])["response"]["id"]
    kept = get(app, f"{PATH}/{name}")
    assert kept["status"] == "completed"
    assert text(kept).endswith("utwo0;")


def test_an_answer_that_cannot_be_kept_is_an_error_and_no_answer(settings):
    with make_app(settings, "full") as app:
        store = app.state.recordings.responses._database
        app.run(store.run(lambda connection: connection.execute("PRAGMA max_page_count = 1")))
        large = {"metadata": {str(number): os.urandom(250).hex() for number in range(16)}}
        refused = ask(app, "x", 503, **large)["error"]
        assert refused["code"] == "storage_full"
        stream = app.post(PATH, input="x", stream=True, **large).text
        assert "response.completed" not in stream
        assert stream.count("event: response.failed") == 1
        assert "is full, so nothing can be stored" in stream
        assert text(ask(app, "x", store=False, **large))


def test_an_input_that_is_too_large_to_be_kept_is_refused_before_work(settings):
    with make_app(settings, "small", responses_max_mib=1) as app:
        refused = ask(app, "x" * 300_000, 413)["error"]
        assert refused["param"] == "input"
        assert "--responses-max-mib" in refused["message"]


def test_responses_live_on_when_the_server_starts_again(settings):
    with make_app(settings, "again") as app:
        first = ask(app, "one")
    with make_app(settings, "again") as app:
        assert get(app, f"{PATH}/{first['id']}") == first
        assert text(ask(app, "two", previous_response_id=first["id"])).endswith("utwo0;")


def test_without_a_store_what_needs_one_is_refused_with_the_setting_s_name(bare: App):
    for field in ({"previous_response_id": "resp_x"}, {"conversation": "conv_x"}, {"background": True}):
        refused = ask(bare, "x", 400, **field)["error"]
        assert refused["param"] == next(iter(field))
        assert "--responses-store" in refused["message"]
    refused = bare.post(CONVERSATIONS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_available")
    for path in (f"{PATH}/resp_x", f"{PATH}/resp_x/input_items", f"{CONVERSATIONS}/conv_x"):
        assert "--responses-store" in get(bare, path, 404)["error"]["message"]


def test_without_a_store_the_switch_is_told(bare: App):
    response = bare.post(PATH, input="x", store=True)
    assert response.status_code == 200
    assert response.headers["x-tureen-ignored"] == "store"
    for nothing in ({}, {"store": False}, {"store": None}):
        assert "x-tureen-ignored" not in bare.post(PATH, input="x", **nothing).headers


def test_a_conversation_takes_items_and_no_names_of_others(app):
    items = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}]
    conversation = app.post(CONVERSATIONS, items=items[:1]).json()["id"]
    for path in (CONVERSATIONS, f"{CONVERSATIONS}/{conversation}/items"):
        answer = app.post(path, items=items)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "items[1].type"
    assert len(app.request("GET", f"{CONVERSATIONS}/{conversation}/items").json()["data"]) == 1


def test_openai_s_client_keeps_a_conversation(settings):
    folder = settings["folder"]
    more = {"chat_template": settings["chat_template"], "responses_store": f"{folder}/client.db"}
    with ServedApp(**more) as server, make_client(server.url) as client:
        first = client.responses.create(model="fake-model", input="one")
        second = client.responses.create(model="fake-model", input="two", previous_response_id=first.id)
        assert client.responses.retrieve(second.id) == second
        listed = list(client.responses.input_items.list(second.id, limit=1))
        assert [item.role for item in listed] == ["user", "assistant", "user"]
        conversation = client.conversations.create(items=[{"role": "user", "content": "hello"}])
        client.responses.create(model="fake-model", input="three", conversation=conversation.id)
        assert len(list(client.conversations.items.list(conversation.id))) == 3
        client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "four"}])
        assert client.conversations.update(conversation.id, metadata={"a": "b"}).metadata == {"a": "b"}
        client.conversations.delete(conversation.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


def test_an_item_is_named_in_place_of_being_sent(app: App):
    """Items of requests, of answers and of conversations, whatever the new request continues."""
    first = ask(app, [{"role": "user", "content": "one", "id": "msg_of_mine"}])
    sent = [{"role": "user", "content": "one"}, *first["output"], {"role": "user", "content": "two"}]
    named = [
        {"type": "item_reference", "id": "msg_of_mine"},
        {"id": first["output"][0]["id"]},
        {"role": "user", "content": "two"},
    ]
    answer = ask(app, named)
    assert text(answer) == text(ask(app, sent))
    listed = get(app, f"{PATH}/{answer['id']}/input_items?order=asc")["data"]
    assert [item["id"] for item in listed][:2] == ["msg_of_mine", first["output"][0]["id"]]
    conversation = get(app, CONVERSATIONS, method="POST", json={"items": [{"role": "user", "content": "in it"}]})
    item = get(app, f"{CONVERSATIONS}/{conversation['id']}/items")["data"][0]
    assert text(ask(app, [{"type": "item_reference", "id": item["id"]}])) == "uin it0;"


def test_an_item_that_is_not_there_or_another_client_s_is_not_found(settings, bare: App):
    keys = {"api_key_file": f"{settings['folder']}/keys"}
    with make_app(settings, "named", **keys) as app:
        ada, bob = ({"authorization": f"Bearer KEY-{name}"} for name in ("ADA", "BOB"))
        body = {"input": [{"role": "user", "content": "one", "id": "msg_1"}]}
        assert app.request("POST", PATH, json=body, headers=ada).status_code == 200
        for headers, status in ((ada, 200), (bob, 404)):
            body = {"input": [{"type": "item_reference", "id": "msg_1"}]}
            answer = app.request("POST", PATH, json=body, headers=headers)
            assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == "input[0].id"
    refused = ask(bare, [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}], 400)
    assert refused["error"]["param"] == "input[1].type"
    assert "--responses-store" in refused["error"]["message"]


def test_items_that_are_only_named_count_as_if_they_had_been_sent(settings):
    """A few bytes would else be text without bounds, in memory and in the file."""
    with make_app(settings, "manifold", responses_max_mib=1, max_body_bytes=600_000) as app:
        long = [{"role": "user", "content": "x" * 50_000}]
        conversation = get(app, CONVERSATIONS, method="POST", json={"items": long})
        [item] = get(app, f"{CONVERSATIONS}/{conversation['id']}/items")["data"]
        for count in (6, 20):  # more than one response may take of the file; more than a request may have
            refused = ask(app, [{"type": "item_reference", "id": item["id"]}] * count, 413)["error"]
            assert refused["param"] == "input"


def test_a_stream_whose_client_leaves_is_kept_as_far_as_it_came(settings):
    more = {"chat_template": settings["chat_template"], "responses_store": f"{settings['folder']}/left.db"}
    with ServedApp(slow=True, **more) as server, make_client(server.url) as client:
        seen, name = "", ""
        with client.responses.create(model="m", input="a" * 400, stream=True, max_output_tokens=400) as stream:
            for event in stream:
                if event.type == "response.created":
                    name = event.response.id
                if event.type == "response.output_text.delta":
                    seen += event.delta
                    break
        where = f"{server.url}{PATH}/{name}"
        server.check_idle()
        kept = httpx.get(where).json()
    assert kept.pop("ignored_fields") == ["model"]
    Response.model_validate(kept, strict=True, extra="forbid")
    assert kept["status"] == "cancelled"
    assert text(kept).startswith(seen)
    assert len(text(kept)) < 400


def test_a_stream_that_an_error_ends_is_kept_as_failed(settings):
    with make_app(settings, "failed", slow=True) as app:
        run = Run.updates

        async def failing(self, interval=None):
            async with contextlib.aclosing(run(self, interval)) as updates:
                async for output in updates:
                    yield output
                    raise RequestFailed("the device is gone", code="device_lost")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Run, "updates", failing)
            stream = app.post(PATH, input="a" * 100, stream=True).text
        events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
        assert [event["type"] for event in (events[0], events[-1])] == ["response.created", "response.failed"]
        app.wait_until(lambda: not app.state.recordings.responses.background)
        kept = get(app, f"{PATH}/{events[0]['response']['id']}")
    assert (kept["status"], kept["error"]) == ("failed", events[-1]["response"]["error"])
    Response.model_validate(kept, strict=True, extra="forbid")


def test_of_two_responses_that_ask_for_one_name_at_once_the_second_is_refused(settings):
    with make_app(settings, "twice") as app:

        async def both() -> list[httpx.Response]:
            body = {"input": "a", "rid": "resp_mine", "background": True}
            return list(await asyncio.gather(*(app.http.post(PATH, json=body) for _ in range(2))))

        answers = sorted(app.run(both()), key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [200, 400]
        error = answers[1].json()["error"]
        assert (error["param"], error["code"]) == ("rid", "duplicate_rid")
        assert get(app, f"{PATH}/resp_mine")["id"] == "resp_mine"
