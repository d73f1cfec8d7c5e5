"""`tureen.Engine` gives what HTTP gives, without a server."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from timeouts import wait_until

import tureen
from tureen.app.application import build_app
from tureen.errors import InvalidRequest, NotFound, StartupError, Unavailable

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def engine(default_model_source):
    with tureen.Engine(max_total_tokens=2048, engine="thread", speculative=False) as running:
        yield running


def over_http(engine, path="/generate", **body):
    """What the same engine answers through the HTTP application."""

    async def post():
        app = build_app(engine._client, engine._state.context.tokenizer, engine._config)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            return (await http.post(path, json=body)).json()

    return engine._wait(post())


def shape(value):
    """Types and keys of a JSON value."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value)


def test_an_answer_has_the_keys_and_tokens_of_http(engine):
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    offline = engine.generate(PROMPT, GREEDY, **fields)
    http = over_http(engine, text=PROMPT, sampling_params=GREEDY, **fields)
    assert shape(offline) == shape(http)
    assert (offline["text"], offline["output_ids"]) == (http["text"], http["output_ids"])
    batch = engine.generate([PROMPT, "Once"], [GREEDY, GREEDY | {"max_new_tokens": 3}])
    assert batch[0]["output_ids"] == offline["output_ids"]
    assert len(batch[1]["output_ids"]) == 3


def test_a_stream_is_an_iterator_of_growing_answers(engine):
    whole = engine.generate(PROMPT, GREEDY)
    events = list(engine.generate(PROMPT, GREEDY, stream=True))
    assert events[-1]["text"] == whole["text"]
    assert all(whole["text"].startswith(event["text"]) for event in events)
    for _ in engine.generate(PROMPT, {"max_new_tokens": 500, "ignore_eos": True}, stream=True):
        break  # leaving early aborts the request
    assert engine.generate(PROMPT, GREEDY)["output_ids"] == whole["output_ids"]


def test_it_works_from_asynchronous_code(engine):
    async def scenario():
        answers = await asyncio.gather(*(engine.async_generate(PROMPT, GREEDY) for _ in range(3)))
        stream = await engine.async_generate(PROMPT, GREEDY, stream=True)
        return answers, [event async for event in stream]

    answers, events = asyncio.run(scenario())
    assert {tuple(one["output_ids"]) for one in answers} == {tuple(events[-1]["output_ids"])}


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [("", {}, "text"), ("a", {"temprature": 0}, "sampling_params.temprature"), ("a", {"top_k": -2}, "top_k")],
)
def test_bad_values_raise_the_error_that_names_the_field(engine, prompt, params, field):
    with pytest.raises(InvalidRequest) as refused:
        engine.generate(prompt, params)
    assert field in refused.value.field
    with pytest.raises(InvalidRequest):
        next(engine.generate(prompt, params, stream=True))


def test_it_can_be_shut_down_twice_and_leaves_no_thread(default_model_source):
    before = set(threading.enumerate())
    engine = tureen.Engine(max_total_tokens=512, engine="thread")
    assert engine.generate(PROMPT, GREEDY)["text"]
    left = engine.generate(PROMPT, GREEDY, stream=True)
    next(left)
    engine.shutdown()
    engine.shutdown()
    left.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of all threads")
    for late in (engine.generate, engine.flush_cache):
        with pytest.raises(Unavailable, match="shut down"):
            late()


def test_a_wrong_setting_or_model_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(StartupError, match="--page-size"):
        tureen.Engine(page_size=0)
    with pytest.raises(StartupError):
        tureen.Engine(model_path="/nowhere/at/all")
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of all threads")


def test_hidden_states_and_embeddings_are_those_of_http(engine):
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_hidden_states": True}
    here = engine.generate(PROMPT, GREEDY, return_hidden_states=True)["meta_info"]["hidden_states"]
    assert here == over_http(engine, **body)["meta_info"]["hidden_states"]
    *_, last = engine.generate(PROMPT, GREEDY, return_hidden_states=True, stream=True)
    assert last["meta_info"]["hidden_states"] == here
    vector = engine.encode(PROMPT)["embedding"]
    assert vector == over_http(engine, "/encode", text=PROMPT)["embedding"]
    assert sum(value * value for value in vector) == pytest.approx(1)
    length = sum(value * value for value in here[0][-1]) ** 0.5
    assert vector == pytest.approx([value / length for value in here[0][-1]])


def test_a_session_continues_what_was_said(engine):
    session = engine.open_session(4000)
    first = engine.generate(PROMPT, GREEDY, session_params={"id": session})
    params = {"id": session, "rid": first["meta_info"]["id"]}
    second = engine.generate(" It lies on", GREEDY, session_params=params)
    whole = engine.generate(PROMPT + first["text"] + " It lies on", GREEDY)
    assert second["text"] == whole["text"]
    assert second["meta_info"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
    engine.close_session(session)
    with pytest.raises(NotFound):
        engine.close_session(session)
