"""Responses that are made without a connection: asked for, followed, cancelled, charged to their client."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
import pydantic
import pytest
from app_under_test import App
from openai.types.responses import Response, ResponseStreamEvent
from openai_judge import make_client
from served_app import ServedApp
from timeouts import until

PATH = "/v1/responses"
TEMPLATE = "{{ messages[-1]['content'] }}"
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def settings(tmp_path) -> dict[str, str]:
    (tmp_path / "last.jinja").write_text(TEMPLATE)
    return {"chat_template": str(tmp_path / "last.jinja"), "responses_store": str(tmp_path / "store.db")}


def begin(app: App, said: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = app.post(PATH, input=said, background=True, **body)
    assert response.status_code == status, response.text
    return response.json()


def look(app: App, name: str) -> dict[str, Any]:
    answer = app.request("GET", f"{PATH}/{name}").json()
    Response.model_validate(answer, strict=True, extra="forbid")
    return answer


def end_of(app: App, name: str) -> dict[str, Any]:
    app.run(until(lambda: not app.state.recordings.responses.background, "the end of what runs in the background"))
    return look(app, name)


def events_of(text: str) -> list[dict[str, Any]]:
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    for event in events:
        EVENT.validate_python(event, strict=True, extra="forbid")
    return events


def test_the_answer_comes_at_once_and_the_response_later(settings):
    with App(**settings) as app:
        answer = begin(app, "say:hello", max_output_tokens=20)
        Response.model_validate(answer, strict=True, extra="forbid")
        assert (answer["status"], answer["background"], answer["output"]) == ("queued", True, [])
        done = end_of(app, answer["id"])
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["text"] == "hello"
        assert done["usage"]["output_tokens"] == len("hello") + 1
        whole = app.post(PATH, input="say:hello", max_output_tokens=20).json()
        unlike = {"id", "background", "created_at", "completed_at", "output"}
        assert {name for name in whole if whole[name] != done[name]} <= unlike | {"usage"}
        after = app.post(PATH, input="say:more", previous_response_id=answer["id"])
        assert after.status_code == 200
        app.check_idle()


def test_what_is_asked_wrongly_is_refused_at_once(settings):
    with App(**settings) as app:
        assert begin(app, "x", 400, temperature=-1)["error"]["param"] == "temperature"
        assert begin(app, "x", 404, previous_response_id="resp_x")["error"]["param"] == "previous_response_id"


def test_a_fault_of_the_model_is_found_in_the_response(settings):
    with App(**settings) as app:
        failed = end_of(app, begin(app, "say:ok\x01a", stream=False)["id"])
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert "the model failed" in failed["error"]["message"]
        app.check_idle()


def test_its_stream_can_be_followed_from_any_event_again_and_again(settings):
    with App(**settings) as app:
        response = app.post(PATH, input="say:one two three", background=True, stream=True)
        events = events_of(response.text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"]
        assert kinds[-1] == "completed"
        statuses = [event["response"]["status"] for event in events if "response" in event]
        assert statuses == ["queued", "queued", "in_progress", "completed"]
        name = events[0]["response"]["id"]
        assert look(app, name) == events[-1]["response"]
        for after in (None, 0, 5, len(events) - 2):
            query = "stream=true" if after is None else f"stream=true&starting_after={after}"
            again = app.request("GET", f"{PATH}/{name}?{query}")
            assert again.headers["content-type"].startswith("text/event-stream")
            assert events_of(again.text) == events[0 if after is None else after + 1 :]
        refused = app.request("GET", f"{PATH}/{name}?stream=true&starting_after={len(events) - 1}")
        assert refused.json()["error"]["param"] == "starting_after"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("stream=true", "stream"),
        ("stream=maybe", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("foo=1", "the query.foo"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(settings, query, named):
    with App(**settings) as app:
        name = app.post(PATH, input="say:a").json()["id"]
        refused = app.request("GET", f"{PATH}/{name}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)


def test_a_client_that_leaves_does_not_end_it_and_can_come_back(settings):
    with ServedApp(slow=True, **settings) as server:
        body = {"input": "abc", "background": True, "stream": True, "max_output_tokens": 800}
        seen: list[str] = []
        with httpx.stream("POST", server.url + PATH, json=body) as response:
            for line in response.iter_lines():
                seen.append(line)
                if line.startswith("data:") and "delta" in line:
                    break
        first = events_of("\n".join(seen))
        name, last = first[0]["response"]["id"], first[-1]["sequence_number"]
        assert httpx.get(f"{server.url}{PATH}/{name}").json()["status"] == "in_progress"
        rest = events_of(httpx.get(f"{server.url}{PATH}/{name}?stream=true&starting_after={last}").text)
        assert [event["sequence_number"] for event in rest] == list(range(last + 1, last + 1 + len(rest)))
        text = "".join(event["delta"] for event in first + rest if event["type"] == "response.output_text.delta")
        assert rest[-1]["response"]["output"][0]["content"][0]["text"] == text
        assert rest[-1]["response"]["status"] == "incomplete"


def test_openai_s_client_waits_for_a_response_and_cancels_another(settings):
    with ServedApp(slow=True, **settings) as server, make_client(server.url) as client:
        running = client.responses.create(model="fake-model", input="abc", background=True)
        assert running.status == "queued"
        server.wait_until(lambda: server.stats.num_running, "the beginning of the response")
        cancelled = client.responses.cancel(running.id)
        assert cancelled.status == "cancelled"
        server.wait_until(lambda: not server.stats.num_running, "the end of what was cancelled")
        assert client.responses.cancel(running.id).status == "cancelled", "to cancel twice is the same"
        assert client.responses.retrieve(running.id).status == "cancelled"
        short = client.responses.create(model="fake-model", input="say:a", background=True)
        server.wait_until(lambda: not server.state.recordings.responses.background, "the end of a short response")
        assert client.responses.retrieve(short.id).status == "completed"


def cancelled(app: App, name: str) -> httpx.Response:
    return app.request("POST", f"{PATH}/{name}/cancel")


def test_only_what_runs_in_the_background_is_cancelled(settings):
    with App(**settings) as app:
        refused = cancelled(app, app.post(PATH, input="say:a").json()["id"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_in_background")
        done = end_of(app, begin(app, "say:a")["id"])
        assert cancelled(app, done["id"]).json() == done


def test_what_is_cancelled_before_it_began_is_cancelled(settings):
    with App(**settings) as app:
        name = begin(app, "say:a")["id"]
        answer = cancelled(app, name).json()
        assert answer["status"] == "cancelled"
        assert end_of(app, name) == answer
        app.check_idle()


def test_what_is_deleted_while_it_runs_ends(settings):
    with App(slow=True, **settings) as app:
        name = begin(app, "abc")["id"]
        app.wait_until(lambda: app.client.stats.num_running)
        assert app.request("DELETE", f"{PATH}/{name}").json()["deleted"] is True
        assert app.request("GET", f"{PATH}/{name}").status_code == 404
        app.check_idle()


def test_the_client_s_limits_hold_in_the_background_too(settings):
    with App(slow=True, max_client_requests=1, **settings) as app:
        name = begin(app, "abc")["id"]
        refused = app.post(PATH, input="say:a")
        assert refused.status_code == 429
        assert cancelled(app, name).status_code == 200
        assert app.post(PATH, input="say:a").status_code == 200


def test_a_client_without_tokens_left_is_refused_at_once(settings):
    with App(slow=True, client_tokens_per_minute=100, **settings) as app:
        name = begin(app, "abc", max_output_tokens=80)["id"]
        assert begin(app, "abc", 429, rid="refused", max_output_tokens=80)["error"]["code"] == "tokens_per_minute"
        assert app.request("GET", f"{PATH}/refused").status_code == 404, "nothing of it is kept"
        cancelled(app, name)


def test_a_server_that_shuts_down_says_so_in_what_it_could_not_finish(settings):
    with App(slow=True, **settings) as app:
        name = begin(app, "abc")["id"]
        app.wait_until(lambda: app.client.stats.num_running)
    with App(**settings) as app:
        left = look(app, name)
        assert left["status"] in ("failed", "incomplete")
        assert left["error"] or left["incomplete_details"]


def test_an_end_that_cannot_be_kept_is_found_as_a_failure(settings):
    with App(slow=True, max_client_requests=1, **settings) as app:
        large = {str(number): os.urandom(250).hex() for number in range(16)}
        name = begin(app, "abc", max_output_tokens=1500, metadata=large)["id"]
        full = app.state.recordings.responses._database.run(
            lambda connection: connection.execute("PRAGMA max_page_count = 1")
        )
        app.run(full)
        failed = end_of(app, name)
        assert failed["status"] == "failed"
        assert "is full, so nothing can be stored" in failed["error"]["message"]
        assert app.post(PATH, input="say:a", store=False).status_code == 200, "it counts no longer for its client"


def test_many_at_once_are_all_kept(settings):
    with App(**settings) as app:

        async def all_of() -> list[httpx.Response]:
            asked = [{"input": f"say:{number}", "background": True} for number in range(30)]
            return await asyncio.gather(*(app.http.post(PATH, json=body) for body in asked))

        names = [response.json()["id"] for response in app.run(all_of())]
        app.run(until(lambda: not app.state.recordings.responses.background, "the end of all"))
        texts = [look(app, name)["output"][0]["content"][0]["text"] for name in names]
        assert texts == [str(number) for number in range(30)]
        app.check_idle()
