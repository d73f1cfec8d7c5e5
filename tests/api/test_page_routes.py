"""Routes of the documentation pages beside /generate: platforms' own paths, files, logging."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from app_under_test import App
from embedding_engine import make_embedding_engine
from virtual_clock import Elsewhere

from tureen.dialects.sglang import from_file

GREEDY = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(chat_template="chatml") as running:
        yield running


@pytest.mark.parametrize("path", ["/ready", "/ping", "/health", "/health_scheduler"])
def test_a_platform_s_probe_is_open_and_empty_and_says_when_the_server_drains(path):
    with App(api_key="k") as app:
        response = app.request("GET", path)
        assert (response.status_code, response.text) == (200, "")
        app.state.lifecycle.is_draining = True
        assert app.request("GET", path).status_code == 503


def test_the_figures_that_routers_and_trainers_of_sglang_read_are_there(app: App):
    assert app.request("GET", "/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    ]
    assert app.request("GET", "/get_weight_version").json() == {"weight_version": "default"}
    facts = app.request("GET", "/get_model_info").json()
    keys = {"model_path", "is_generation", "tokenizer_path", "preferred_sampling_params", "weight_version"}
    assert keys <= facts.keys()
    server = app.request("GET", "/server_info").json()
    [card] = app.request("GET", "/v1/models").json()["data"]
    assert (server["served_model_name"], server["model_path"]) == (card["id"], facts["model_path"])
    assert app.request("GET", "/freeze_gc").text == app.request("POST", "/freeze_gc").text


@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info"])
def test_the_tokenizer_is_told_in_vllms_words(app: App, path):
    facts = app.request("GET", path).json()
    assert facts["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "<|im_start|>" in facts["chat_template"]
    assert facts["model_max_length"] == app.request("GET", "/v1/models").json()["data"][0]["max_model_len"]


@pytest.mark.parametrize("body", [{"rid": "", "abort_all": True}, {"rid": None, "abort_all": True}, {"rid": "none"}])
def test_an_abort_takes_an_empty_rid_for_none(app: App, body):
    assert app.post("/abort_request", **body).json() == {"aborted": 0}


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/update_weights"])
def test_an_update_to_a_model_that_is_not_there_fails_in_the_words_of_the_page(app: App, path):
    name = "qwen/qwen2.5-0.5b-instruct-wrong"
    answer = app.post(path, model_path=name)
    told = answer.json()
    assert (answer.status_code, told["success"], told["num_paused_requests"]) == (400, False, 0)
    assert told["message"] == f"Failed to get weights iterator: {name} (repository not found)."
    assert told["error"]["param"] == "model_path"
    assert app.post(path).json()["message"].startswith("Failed to update weights: ")
    left = app.post("/destroy_weights_update_group", group_name="x").json()
    assert left["message"] == left["error"]["message"]


def test_adapters_that_cannot_be_loaded_or_unloaded_say_so_in_sglangs_fields(app: App):
    answer = app.post("/unload_lora_adapter", lora_name="none").json()
    assert (answer["success"], answer["loaded_adapters"]) == (False, {})
    assert answer["error_message"] == answer["error"]["message"]
    assert "never been loaded" in answer["error_message"]


@pytest.mark.parametrize("name", ["score", "rerank"])
def test_a_route_is_there_without_the_version_too(app: App, name):
    body = {"query": "a", "items": ["b"], "label_token_ids": [5], "documents": ["b"]}
    fields = {"score": ("query", "items", "label_token_ids"), "rerank": ("query", "documents")}[name]
    with_version, without = (
        app.post(path, **{field: body[field] for field in fields}) for path in (f"/v1/{name}", f"/{name}")
    )
    assert (without.status_code, without.json()) == (with_version.status_code, with_version.json())


def test_sagemaker_s_path_answers_as_the_route_that_the_body_is_for(app: App):
    chat = {"messages": [{"role": "user", "content": "say:hi"}], "temperature": 0, "max_tokens": 4, "seed": 5}
    ours, theirs = app.post("/invocations", **chat).json(), app.post("/v1/chat/completions", **chat).json()
    assert ours["choices"] == theirs["choices"]
    prompt = {"prompt": "abc", "temperature": 0, "max_tokens": 4, "seed": 5}
    ours, theirs = app.post("/invocations", **prompt).json(), app.post("/v1/completions", **prompt).json()
    assert ours["choices"] == theirs["choices"]
    streamed = app.post("/invocations", **chat, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"inputs": "a"}])
def test_sagemaker_s_path_refuses_what_is_for_no_route_or_for_two(app: App, body):
    error = app.error(path="/invocations", **body)
    assert error["message"].startswith("send exactly one of messages (as /v1/chat/completions), prompt ")


def test_sagemaker_s_path_embeds_where_the_model_does():
    with App(factory=make_embedding_engine) as app:
        ours, theirs = (app.post(path, input="abc").json() for path in ("/invocations", "/v1/embeddings"))
        assert ours["data"] == theirs["data"]
        assert app.post("/invocations", prompt="a").status_code == 400


def test_vertex_s_path_answers_as_a_batch(app: App):
    instances = [{"text": "abc"}, {"text": "abd"}]
    parameters = {"sampling_params": GREEDY, "return_logprob": True}
    answer = app.post("/vertex_generate", instances=instances, parameters=parameters)
    assert answer.status_code == 200, answer.text
    expected = app.generate(text=["abc", "abd"], **parameters)
    assert [one["text"] for one in answer.json()["predictions"]] == [one["text"] for one in expected]
    of_ids = app.post(
        "/vertex_generate", instances=[{"input_ids": [97, 98, 99]}], parameters={"sampling_params": GREEDY}
    )
    assert [one["text"] for one in of_ids.json()["predictions"]] == [expected[0]["text"]]
    assert app.post("/vertex_generate", instances=[]).json() == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"instances": [{"text": "a"}, {"input_ids": [5]}]}, "instances"),
        ({"instances": [{"text": "a", "input_ids": [5]}]}, "instances"),
        ({"instances": [{}]}, "instances"),
        ({"instances": [{"txt": "a"}]}, "instances[0].txt"),
        ({"instances": [{"text": "a"}], "parameters": {"stream": True}}, "parameters.stream"),
        ({"instances": [{"text": "a"}], "parameters": {"text": "b"}}, "parameters.text"),
        ({"instances": [{"text": "a"}], "parameters": {"sampling_params": {"top_p": 5}}}, "sampling_params.top_p"),
        ({"instances": [{"text": "a"}] * 129}, "text"),
        ({}, "instances"),
    ],
)
def test_a_wrong_body_of_vertex_is_refused_by_name(app: App, body, field):
    assert app.error(path="/vertex_generate", **body)["param"] == field


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_a_model_that_classifies_is_not_there_and_that_is_said(app: App, path):
    for body in ({"input": "a"}, {"text": "a"}, {}):
        assert app.error(path=path, **body)["code"] == "not_a_classification_model"
    assert app.error(path=path, text=5)["param"] == "text"  # the form of a body is checked first, as on all routes


def test_embeddings_of_a_file_below_the_media_path_are_a_prompt(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "prompt.json").write_text(json.dumps([[0.5] * 4, [0.25] * 4]))
    (tmp_path / "served" / "text.json").write_text("{}")
    (tmp_path / "secret.json").write_text("[[0.5, 0.5, 0.5, 0.5]]")
    (tmp_path / "served" / "link.json").symlink_to(tmp_path / "secret.json")
    parameters = {"sampling_params": GREEDY}
    with App(media_path=str(tmp_path / "served")) as app:
        answer = app.post("/generate_from_file", file="prompt.json", parameters=parameters)
        expected = app.generate(input_embeds=[[0.5] * 4, [0.25] * 4], **parameters)
        assert answer.json()["output_ids"] == expected["output_ids"]
        assert app.error(path="/generate_from_file", file="text.json")["param"] == "file"
        assert app.error(path="/generate_from_file", file="prompt.json", parameters={"text": "a"})
        for name in ("../secret.json", str(tmp_path / "secret.json"), "link.json", "none.json", "."):
            response = app.post("/generate_from_file", file=name)
            assert (response.status_code, response.json()["error"]["param"]) == (403, "file")
    with App(media_path="") as app:
        assert app.post("/generate_from_file", file="prompt.json").status_code == 403


def test_a_file_of_embeddings_may_be_uploaded_as_sglang_takes_it(app: App):
    embeds = [[0.5] * 4, [0.25] * 4]
    answer = app.request("POST", "/generate_from_file", files={"file": ("p.json", json.dumps(embeds).encode())})
    expected = app.generate(input_embeds=embeds, sampling_params={"temperature": 0, "max_new_tokens": 512})
    assert (answer.status_code, answer.json()["output_ids"]) == (200, expected["output_ids"])
    for files, data, field in (
        ({"file": b"no list"}, {}, "file"),
        ({"other": ("a", b"[]")}, {}, "file"),
        ({"file": b"[]"}, {"stream": "true"}, "stream"),
    ):
        refused = app.request("POST", "/generate_from_file", files=files, data=data)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_a_large_file_of_embeddings_is_decoded_beside_the_event_loop(tmp_path, monkeypatch):
    depths = []
    decode = from_file._decoded

    def noted(data: bytes) -> object:
        depths.append(Elsewhere.depth)
        return decode(data)

    monkeypatch.setattr(from_file, "_decoded", noted)
    (tmp_path / "large.json").write_text(json.dumps([[0.5] * 2000] * 20))
    with App(media_path=str(tmp_path)) as app:
        app.post("/generate_from_file", file="large.json")
    assert depths == [1]


CONTENTS_LOGGED = {
    "log_requests": True,
    "log_requests_level": 2,
    "dump_requests_folder": "/tmp/x",
    "dump_requests_threshold": 100,
}
"""What SGLang's clients send there besides."""


def test_the_level_of_logging_is_the_operator_s_to_change():
    logger = logging.getLogger("tureen")
    before = logger.level
    try:
        with App(api_key="k", admin_api_key="a") as app:
            assert app.post("/configure_logging", log_level="error").status_code == 401
            key = {"authorization": "Bearer a"}
            changed = app.request("POST", "/configure_logging", json={"log_level": "error"}, headers=key)
            assert (changed.json(), logger.level) == ({"log_level": "error"}, logging.ERROR)
            assert app.request("GET", "/configure_logging", headers=key).json() == {"log_level": "error"}
            for field, value in CONTENTS_LOGGED.items():
                refused = app.request("POST", "/configure_logging", json={field: value}, headers=key).json()["error"]
                assert (refused["code"], refused["param"]) == ("not_available", field)
            nothing = dict.fromkeys(CONTENTS_LOGGED) | {"log_requests": False, "log_requests_level": 0}
            assert app.request("POST", "/configure_logging", json=nothing, headers=key).status_code == 200
    finally:
        logger.setLevel(before)
