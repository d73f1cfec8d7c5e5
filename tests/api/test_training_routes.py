"""vLLM's routes for training loops: they do what SGLang's do, and answer as vLLM's clients read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_under_test import App, parse_events
from timeouts import until

LONG = {"text": "abc", "sampling_params": {"max_new_tokens": 1500, "temperature": 0}}
PREFIX = {"text": "a" * 64, "sampling_params": {"max_new_tokens": 1}}
ADAPTER = {"lora_name": "whisper", "lora_path": "/adapters/whisper"}


@pytest.fixture
def app():
    with App() as running:
        yield running


@pytest.fixture
def slow():
    with App(slow=True) as running:
        yield running


def begin(app: App) -> asyncio.Task[Any]:
    """A request that has begun to run."""

    async def started() -> asyncio.Task[Any]:
        task = asyncio.create_task(app.http.post("/generate", json=LONG))
        await until(lambda: app.client.stats.total_output_tokens)
        return task

    return app.run(started())


def answer_of(app: App, task: asyncio.Task[Any]) -> dict[str, Any]:
    async def ended() -> Any:
        return await task

    return app.run(ended()).json()


def is_paused(app: App) -> bool:
    return app.request("GET", "/is_paused").json()["is_paused"]


def cached(app: App) -> int:
    return app.generate(**PREFIX)["meta_info"]["cached_tokens"]


@pytest.mark.parametrize(("query", "reason"), [("", "abort"), ("?mode=abort", "abort"), ("?mode=keep", "length")])
def test_a_pause_ends_what_runs_or_keeps_it(slow, query, reason):
    task = begin(slow)
    assert slow.request("POST", f"/pause{query}").json() == {"status": "paused"}
    assert is_paused(slow)
    assert slow.request("POST", "/resume").json() == {"status": "resumed"}
    assert not is_paused(slow)
    answer = answer_of(slow, task)
    assert answer["meta_info"]["finish_reason"]["type"] == reason


@pytest.mark.parametrize("query", ["mode=wait", "wait_for_inflight_requests=true"])
def test_a_pause_that_waits_lets_what_runs_end_and_nothing_begin(slow, query):
    async def scenario() -> tuple[Any, Any, bool]:
        running = asyncio.create_task(slow.http.post("/generate", json=LONG))
        await until(lambda: slow.client.stats.total_output_tokens)
        pausing = asyncio.create_task(slow.http.post(f"/pause?{query}"))
        first = await running
        await pausing
        later = asyncio.create_task(slow.http.post("/generate", json=PREFIX))
        for _ in range(30):
            await slow.client.call("stats")
        waits = not later.done()
        await slow.http.post("/resume")
        return first.json(), (await later).json(), waits

    first, later, waits = slow.run(scenario())
    assert waits
    assert first["meta_info"]["finish_reason"]["type"] == "length"
    assert later["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize(("query", "is_kept"), [("", False), ("?clear_cache=false", True), ("?mode=keep", True)])
def test_a_pause_forgets_prefixes_unless_it_keeps_them(app, query, is_kept):
    cached(app)
    app.request("POST", f"/pause{query}")
    app.request("POST", "/resume")
    assert bool(cached(app)) == is_kept


def test_the_prefix_cache_is_forgotten_and_a_running_request_is_in_the_way_unless_it_may_be_computed_again(slow):
    cached(slow)
    assert cached(slow)
    assert slow.request("POST", "/reset_prefix_cache").content == b""
    assert not cached(slow)
    alone = slow.generate(**LONG)["output_ids"]
    before = slow.client.stats.total_output_tokens
    task = begin(slow)
    slow.wait_until(lambda: slow.client.stats.total_output_tokens > before)
    assert "while 1 requests run" in slow.request("POST", "/reset_prefix_cache").json()["error"]["message"]
    assert slow.request("POST", "/reset_prefix_cache?reset_running_requests=true").status_code == 200
    assert answer_of(slow, task)["output_ids"] == alone


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/pause?mode=later", "mode"),
        ("/pause?zebra=1", "zebra"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/reset_prefix_cache?reset_external=true", "reset_external"),
    ],
)
def test_a_query_that_cannot_be_followed_is_refused_by_name(app, path, field):
    response = app.request("POST", path)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert not is_paused(app)


def test_the_world_is_one_rank_here(app):
    assert app.request("GET", "/get_world_size").json() == {"world_size": 1}
    assert app.request("GET", "/get_world_size?include_dp=false").json() == {"world_size": 1}


def test_adapters_come_and_go_with_vllm_s_answers(app):
    loaded = app.post("/v1/load_lora_adapter", **ADAPTER)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'whisper' added successfully.")
    assert "whisper" in [card["id"] for card in app.request("GET", "/v1/models").json()["data"]]
    moved = ADAPTER | {"lora_path": "/adapters/other", "load_inplace": True}
    assert app.post("/v1/load_lora_adapter", **moved).status_code == 200
    assert app.state.adapters == {"whisper": "/adapters/other"}
    gone = app.post("/v1/unload_lora_adapter", lora_name="whisper", lora_int_id=1)
    assert gone.text == "Success: LoRA adapter 'whisper' removed successfully."
    missing = app.post("/v1/unload_lora_adapter", lora_name="whisper")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_name")
    assert app.post("/v1/load_lora_adapter", **ADAPTER, is_3d_lora_weight=True).status_code == 400


TOKENS = "/inference/v1/generate"


def test_token_ids_come_out_with_the_model_s_own_log_probabilities(app):
    params = {"max_tokens": 4, "max_new_tokens": 4, "seed": 3, "logprobs": 2, "prompt_logprobs": 1, "temperature": 0.5}
    answer = app.post(TOKENS, token_ids=list(b"abc"), sampling_params=params, request_id="mine").json()
    ours = app.generate(
        input_ids=list(b"abc"),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        logprobs_mode="raw",
        sampling_params={"max_new_tokens": 4, "sampling_seed": 3, "temperature": 0.5},
    )
    [choice] = answer["choices"]
    meta = ours["meta_info"]
    assert (answer["request_id"], choice["token_ids"]) == ("mine", ours["output_ids"])
    entries = choice["logprobs"]["content"]
    theirs = [(f"token_id:{token_id}", value) for value, token_id, _ in meta["output_token_logprobs"]]
    assert [(entry["token"], entry["logprob"]) for entry in entries] == theirs
    best = [[f"token_id:{token_id}" for _, token_id, _ in place] for place in meta["output_top_logprobs"]]
    assert [[entry["token"] for entry in one["top_logprobs"]] for one in entries] == best
    first, *others = answer["prompt_logprobs"]
    assert first is None
    for place, (value, token_id, _) in zip(others, meta["input_token_logprobs"][1:], strict=True):
        assert place[str(token_id)]["logprob"] == value
    assert choice["weight_version_ranges"] == [{"version": "default", "start": 0, "end": 4}]


def test_minus_one_returns_the_log_probabilities_of_the_whole_vocabulary(app):
    params = {"max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1}
    answer = app.post(TOKENS, token_ids=list(b"ab"), sampling_params=params).json()
    size = app.state.context.info.vocab_size
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == size
    assert len(answer["prompt_logprobs"][1]) == size
    one = app.post(TOKENS, token_ids=list(b"ab"), sampling_params=params | {"prompt_logprobs": 1}).json()
    assert len(one["prompt_logprobs"][1]) <= 2
    long = {"max_tokens": 100, "logprobs": -1, "n": 64}
    error = app.post(TOKENS, token_ids=[97], sampling_params=long).json()["error"]
    assert (error["param"], "-1 could return" in error["message"]) == ("sampling_params.logprobs", True)


def test_a_stream_of_token_ids_is_the_answer_in_pieces(app):
    body = {"token_ids": [97], "sampling_params": {"max_tokens": 5, "seed": 3, "n": 2, "logprobs": 0}}
    whole = app.post(TOKENS, **body).json()["choices"]
    pieces = [event["choices"][0] for event in parse_events(app.post(TOKENS, **body, stream=True).text)]
    for choice in whole:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert [token_id for piece in own for token_id in piece["token_ids"]] == choice["token_ids"]
        assert [entry for piece in own for entry in piece["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({"sampling_params": {"max_tokens": 5000}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 5, "max_new_tokens": 6}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"structured_outputs": {}}}, "structured_outputs"),
        ({"priority": 1}, "priority"),
        ({"request_id": "a b\n"}, "request_id"),
    ],
)
def test_what_is_wrong_about_token_ids_is_named(app, body, field):
    response = app.post(TOKENS, **({"token_ids": [97]} | body))
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_only_an_operator_pauses():
    with App(api_key="k", admin_api_key="a") as app:
        user, operator = ({"authorization": f"Bearer {key}"} for key in "ka")
        assert app.request("POST", "/pause", headers=user).status_code == 403
        assert app.request("POST", "/pause", headers=operator).status_code == 200


def test_options_of_skyrl_s_bodies_act_as_those_of_the_query(slow):
    async def scenario() -> Any:
        running = asyncio.create_task(slow.http.post("/generate", json=LONG))
        await until(lambda: slow.client.stats.total_output_tokens)
        assert (await slow.http.post("/pause", json={"wait_for_inflight_request": True})).status_code == 200
        return (await running).json()

    assert slow.run(scenario())["meta_info"]["finish_reason"]["type"] == "length"
    assert slow.post("/pause", wait_for_inflight=True).json()["error"]["param"] == "wait_for_inflight"
