"""MindIE's own `/infer` and the routes of Triton that it has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_under_test import App, parse_events
from fake_engine import CONTEXT_LEN
from timeouts import until

PAGE_PARAMETERS = {
    "temperature": 0.5, "top_k": 10, "top_p": 0.95, "max_new_tokens": 20, "do_sample": True, "seed": None,
    "repetition_penalty": 1.03, "details": True, "typical_p": 0.5, "watermark": False, "priority": 5, "timeout": 10,
}  # fmt: skip
TENSOR = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [97, 98, 99]}
GENERATE = "/v2/models/fake-model/generate"


@pytest.fixture(scope="module")
def app():
    with App() as running:
        yield running


def post(app: App, path: str, status: int = 200, **body: Any) -> Any:
    response = app.post(path, **body)
    assert response.status_code == status, response.text
    return response.json()


def events(app: App, path: str, **body: Any) -> list[dict[str, Any]]:
    response = app.post(path, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.text + "data: [DONE]\n\n")


def test_the_requests_of_the_page_work(app):
    answer = post(app, "/infer", inputs="My name is Olivier and I", stream=False, parameters=PAGE_PARAMETERS)
    assert answer["details"]["finish_reason"] == "length"
    assert answer["details"]["generated_tokens"] == len(answer["details"]["generated_token_ids"]) == 20
    assert len(answer["generated_text"]) == 20
    triton = {"batch_size": 100, "perf_stat": False, "watermark": False}
    answer = post(app, GENERATE, id="a123", text_input="My name", parameters=PAGE_PARAMETERS | triton)
    assert (answer["id"], answer["model_version"], len(answer["text_output"])) == ("a123", None, 20)


def test_token_ids_in_place_of_a_text_give_the_same(app):
    parameters = {"max_new_tokens": 4, "details": True}
    assert post(app, "/infer", inputs="abc", parameters=parameters) == post(
        app, "/infer_token", input_id=[97, 98, 99], parameters=parameters
    )


def test_a_stream_is_the_answer_in_pieces(app):
    pieces = events(app, "/infer", inputs="say:héy", stream=True, parameters={"details": True})
    assert "".join(piece["token"]["text"] for piece in pieces) == pieces[-1]["generated_text"] == "héy"
    whole = post(app, "/infer", inputs="say:héy", parameters={"details": True})
    token_ids = [token_id for piece in pieces for token_id in piece["token"]["id"]]
    assert token_ids == whole["details"]["generated_token_ids"]
    assert pieces[-1]["details"] == whole["details"]
    assert [piece["prefill_time"] is None for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    assert [piece["decode_time"] is None for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_triton_s_stream_has_the_new_text_in_each_event(app):
    pieces = events(app, f"{GENERATE}_stream", text_input="say:abc", parameters={"details": True})
    assert "".join(piece["text_output"] for piece in pieces) == "abc"
    assert ["details" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece["id"] for piece in pieces} == {pieces[0]["id"]}


@pytest.mark.parametrize(
    ("sent", "greedy"),
    [
        ({}, True),
        ({"do_sample": True}, False),
        ({"do_sample": False, "temperature": 0.5}, True),
        ({"temperature": 0.5}, False),
        ({"top_k": 5}, False),
        ({"repetition_penalty": 1.5}, True),
    ],
)
def test_sampling_is_as_do_sample_says_and_else_as_the_others_do(app, sent, greedy):
    parameters = sent | {"max_new_tokens": 1, "details": True, "seed": 5}
    details = post(app, "/infer", inputs="a", parameters=parameters)["details"]
    assert details["seed"] == (None if greedy else 5)


def test_tensors_of_token_ids_go_in_and_out(app):
    answer = post(
        app,
        "/v2/models/fake-model/infer",
        id="42",
        inputs=[TENSOR],
        outputs=[{"name": "out"}],
        parameters={"max_new_tokens": 2},
    )
    [tensor] = answer["outputs"]
    text = post(app, "/infer", inputs="abc", parameters={"max_new_tokens": 2, "details": True})
    assert tensor["data"] == text["details"]["generated_token_ids"]
    assert (answer["id"], tensor["name"], tensor["shape"], tensor["datatype"]) == ("42", "out", [1, 2], "UINT32")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/infer", {}, "inputs"),
        ("/infer", {"inputs": "a", "input_id": [97]}, "Input conflict"),
        ("/infer", {"inputs": [{"type": "text", "text": "a"}]}, "inputs"),
        ("/infer", {"input_id": [999]}, "input_id"),
        ("/infer", {"inputs": "a", "parameters": {"temperature": 0}}, "parameters.temperature"),
        ("/infer", {"inputs": "a", "parameters": {"priority": 6}}, "parameters.priority"),
        ("/infer", {"inputs": "a", "parameters": {"zebra": 6}}, "zebra"),
        ("/infer", {"inputs": "a", "max_new_tokens": 6}, "it belongs in parameters"),
        (GENERATE, {"text_input": "a", "temperature": 0.5}, "it belongs in parameters"),
        (GENERATE, {"text_input": "a", "id": "é"}, "id"),
        (GENERATE, {"text_input": ""}, "text_input"),
        ("/v2/models/m/infer", {"inputs": [TENSOR | {"shape": [1, 4]}]}, "inputs[0].shape"),
        ("/v2/models/m/infer", {"inputs": [TENSOR | {"shape": [-1, -3]}]}, "inputs[0].shape[0]"),
        ("/v2/models/m/infer", {"inputs": [TENSOR | {"shape": [1, 10**4000]}]}, "inputs[0].shape[1]"),
        ("/v2/models/m/infer", {"inputs": [TENSOR, TENSOR]}, "inputs"),
    ],
)
def test_what_is_wrong_is_named_with_mindie_s_status(app, path, body, said):
    answer = post(app, path, 422, **body)
    assert answer["error_type"] == "Input Validation Error"
    assert said in answer["error"]


def test_the_length_is_bounded_by_max_iter_times():
    with App(max_iter_times=3) as app:
        answer = post(app, "/infer", inputs="a", parameters={"max_new_tokens": 9, "details": True})
        assert answer["details"]["generated_tokens"] == 3


def test_a_request_that_takes_longer_than_its_timeout_fails():
    with App(slow=True) as app:
        answer = post(app, "/infer", 500, inputs="a", parameters={"max_new_tokens": 2000, "timeout": 1})
        assert "deadline" in answer["error"]


def test_priorities_act_where_the_server_has_them(app):
    told = app.post("/infer", inputs="a", parameters={"priority": 1, "max_new_tokens": 1})
    assert told.headers["x-tureen-ignored"] == "parameters.priority"
    with App(enable_priority_scheduling=True) as other:
        taken = other.post("/infer", inputs="a", parameters={"priority": 1, "max_new_tokens": 1})
        assert "x-tureen-ignored" not in taken.headers


def test_a_request_is_ended_by_its_id():
    with App(slow=True) as app:

        async def stop() -> tuple[Any, Any]:
            body = {"id": "mine", "text_input": "a", "parameters": {"max_new_tokens": 2000}}
            running = asyncio.create_task(app.http.post(GENERATE, json=body))
            await until(lambda: app.state.num_running, "the request runs")
            answer = await app.http.post("/v2/models/fake-model/stopInfer", json={"id": "mine"})
            return answer, await running

        answer, ended = app.run(stop())
        assert answer.json() == {"id": "mine"}
        assert (ended.status_code, ended.json()["error_type"]) == (500, "Incomplete Generation")
        app.check_idle()


def test_facts_are_those_of_the_server(app):
    get = {path: app.request("GET", f"/v2{path}") for path in ("", "/health/live", "/health/ready")}
    assert {path: answer.status_code for path, answer in get.items()} == dict.fromkeys(get, 200)
    assert get[""].json()["name"] == "tureen"
    model = {path: app.request("GET", f"/v2/models/a/b{path}") for path in ("", "/ready", "/config", "/getSlotCount")}
    assert model[""].json()["name"] == "a/b"
    assert model["/ready"].content == b""
    assert model["/config"].json()["maxSeqLen"] == CONTEXT_LEN
    slots = model["/getSlotCount"].json()
    assert slots["free_slots"] == slots["total_slots"] == app.state.context.info.max_running_requests


def test_a_server_that_drains_lives_and_is_not_ready():
    with App() as app:
        app.state.lifecycle.is_draining = True
        assert app.request("GET", "/v2/health/live").status_code == 200
        assert app.request("GET", "/v2/health/ready").status_code == 503
        assert app.request("GET", "/v2/models/m/ready").status_code == 503
