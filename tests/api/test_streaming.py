"""Server-sent events: what is joined from them equals the answer given at once."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from app_under_test import App, parse_events
from byte_tokenizer import EOS
from timeouts import PATIENCE_S, until

from tureen.http.dialect import PING

TEXTS = [
    "plain",
    "héllo wörld",
    "日本語のテキスト",
    "🙂👩‍👩‍👧‍👦🇫🇷",
    "é" * 30,
    " leading and trailing ",
    "line\nbreaks\r\n and \u2028 separators",
    'quotes " and \\ slashes and data: [DONE]',
    "x",
]


@pytest.fixture(scope="module")
def incremental():
    with App(incremental_streaming_output=True) as app:
        yield app


def is_whole(text: str) -> bool:
    """No character is cut: a part of one would be decoded as U+FFFD."""
    return "\ufffd" not in text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("interval", [1, 3, 1000])
def test_every_event_has_a_beginning_of_the_text_in_whole_characters(app: App, text, interval):
    body = {"text": f"say:{text}", "sampling_params": {"stream_interval": interval, "max_new_tokens": 500}}
    whole = app.generate(**body)
    assert whole["text"] == text
    events = app.events(**body)
    for event in events:
        assert text.startswith(event["text"])
        assert is_whole(event["text"])
        assert whole["output_ids"][: len(event["output_ids"])] == event["output_ids"]
        assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths)
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    last = events[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert set(last["meta_info"]) == set(whole["meta_info"])
    assert "e2e_latency" not in events[0]["meta_info"] or len(events) == 1


@pytest.mark.parametrize("text", TEXTS)
def test_incremental_events_join_to_the_whole_answer(app: App, incremental: App, text):
    body = {"text": f"say:{text}", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    whole = app.generate(**body)
    events = incremental.events(**body)
    assert "".join(event["text"] for event in events) == whole["text"] == text
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    for kind in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs"):
        assert [entry for event in events for entry in event["meta_info"][kind]] == whole["meta_info"][kind]
    assert events[-1]["meta_info"]["completion_tokens"] == len(whole["output_ids"])


def test_random_texts_and_stops_give_the_same_streamed_and_at_once(app: App, incremental: App):
    rng = random.Random(5)
    for _ in range(60):
        text = "".join(rng.choices("aab é🙂", k=rng.randint(0, 30)))
        stops = ["".join(rng.choices("aab é🙂", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        params = {"stop": stops, "no_stop_trim": rng.random() < 0.3, "max_new_tokens": rng.randint(1, 60)}
        body = {"text": f"say:{text}", "sampling_params": params}
        whole = app.generate(**body)
        if not stops and len(text.encode()) < params["max_new_tokens"]:
            assert whole["text"] == text
        assert all(whole["text"].count(stop) <= 1 for stop in stops)
        events = app.events(**body)
        assert events[-1]["text"] == whole["text"]
        assert all(whole["text"].startswith(event["text"]) for event in events)
        assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
        assert "".join(event["text"] for event in incremental.events(**body)) == whole["text"]


def test_an_output_that_ends_inside_a_character_shows_it_as_replaced_only_at_the_end(app: App):
    body = {"text": "say:aé", "sampling_params": {"max_new_tokens": 2}}
    assert app.generate(**body)["text"] == "a\ufffd"
    events = app.events(**body)
    assert [is_whole(event["text"]) for event in events] == [True] * (len(events) - 1) + [False]


def test_a_prompt_that_ends_inside_a_character_is_not_in_the_text(app: App):
    ids = [*b"say:ab", 0xC3]
    events = app.events(input_ids=ids, sampling_params={"max_new_tokens": 3})
    assert events[-1]["text"] == "ab\ufffd"
    assert all("ab\ufffd".startswith(event["text"]) for event in events)


def test_the_interval_bounds_the_number_of_events_and_the_first_comes_at_once():
    with App(stream_interval=4) as app:
        params = {"max_new_tokens": 10}
        counts = [event["meta_info"]["completion_tokens"] for event in app.events(text="abc", sampling_params=params)]
        assert counts[0] == 1
        assert counts[-1] == 10
        assert len(counts) <= 4
        own = app.events(text="abc", sampling_params=params | {"stream_interval": 1})
        assert len(own) > len(counts)


def test_a_busy_front_sends_fewer_events_each_complete_and_the_same_tokens(monkeypatch):
    for name in ("LOOK_S", "GATHER_S"):  # the test says how busy it is
        monkeypatch.setattr(f"tureen.serving.coalescing.{name}", PATIENCE_S)
    params = {"max_new_tokens": 30, "temperature": 0}
    with App(stream_interval="auto") as app:
        one_by_one = app.events(text="abc", sampling_params=params)
        app.state.interval.is_busy = True
        gathered = app.events(text="abc", sampling_params=params)
        asked = app.events(text="abc", sampling_params=params | {"stream_interval": 1})
    assert len(gathered) < len(one_by_one)
    assert gathered[-1]["output_ids"] == one_by_one[-1]["output_ids"] == asked[-1]["output_ids"]
    for event in gathered:
        assert event["text"] == one_by_one[-1]["text"][: len(event["text"])]
        assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])


def test_a_batch_interleaves_with_an_index_and_each_part_equals_its_answer():
    with App() as app:
        body = {"text": ["abc", "say:x", "abd"], "sampling_params": {"max_new_tokens": 8, "n": 2, "seed": 1}}
        whole = app.generate(**body)
        events = app.events(**body)
        last = {event["index"]: event for event in events}
        assert sorted(last) == list(range(6))
        for index, answer in enumerate(whole):
            assert last[index]["text"] == answer["text"]
            assert last[index]["meta_info"]["id"].rpartition("_")[2] == str(index % 2)
            assert last[index]["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]
        order = [event["index"] for event in events]
        assert order != sorted(order)


def test_a_single_prompt_has_no_index(app: App):
    assert "index" not in app.events(text="say:a")[0]
    assert app.events(text=["say:a"])[0]["index"] == 0


def test_an_error_before_the_first_event_is_a_status(app: App):
    refused = app.post(text="a", stream=True, sampling_params={"top_p": 7})
    assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")


def test_a_later_error_is_the_last_event_before_done(app: App):
    events = app.events(text="say:ab\x01cd")
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["code"] == "nan_logits"
    assert events[-2]["text"].startswith("ab")
    app.check_idle()


def test_a_full_queue_is_a_status_also_for_a_stream():
    with App(slow=True, max_queued_requests=1) as app:

        async def scenario():
            body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 20}}
            return await asyncio.gather(*(app.http.post("/generate", json=body) for _ in range(25)))

        responses = app.run(scenario())
        assert [one.status_code for one in responses].count(503) == 25 - 16 - 1
        for one in responses:
            if one.status_code == 200:
                assert parse_events(one.text)[-1]["meta_info"]["completion_tokens"] == 20
            else:
                assert json.loads(one.text)["error"]["code"] == "queue_full"
        app.check_idle()


def test_a_stream_of_no_tokens_has_one_event(app: App):
    (event,) = app.events(text="abc", sampling_params={"max_new_tokens": 0})
    assert (event["text"], event["output_ids"]) == ("", [])
    assert event["meta_info"]["finish_reason"]["type"] == "length"
    (event,) = app.events(text="say:")
    assert event["output_ids"] == [EOS]


def test_an_aborted_stream_ends_with_an_abort(app: App):
    with App(slow=True) as slow:

        async def scenario():
            body = {"text": "abc", "rid": "x", "stream": True, "sampling_params": {"max_new_tokens": 1900}}
            task = asyncio.create_task(slow.http.post("/generate", json=body))
            await until(lambda: slow.client.stats.num_running != 0)
            await slow.http.post("/abort_request", json={"rid": "x"})
            return await task

        events = parse_events(slow.run(scenario()).text)
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(events[-1]["output_ids"]) < 1900


CHAT = {"messages": [{"role": "user", "content": "say:abc"}], "max_tokens": 9, "stream": True}
STREAMED = {
    "/generate": {"text": "say:abc", "stream": True},
    "/v1/completions": {"prompt": "say:abc", "stream": True},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"model": "any"},
    "/v1/responses": {"input": "say:abc", "max_output_tokens": 9, "stream": True},
    "/completion": {"prompt": "say:abc", "stream": True},
    "/generate_stream": {"inputs": "say:abc"},
    "/api/generate": {"model": "any", "prompt": "say:abc"},
}
LINES_OF_JSON = ("/api/generate",)


@pytest.fixture(scope="module")
def chatting():
    with App(chat_template="chatml") as app:
        yield app


async def held(app, path, body, seconds):
    """Post `body` to a paused server, resume after `seconds`, and return the response."""
    await app.http.post("/pause_generation", json={"mode": "in_place"})
    task = asyncio.create_task(app.http.post(path, json=body))
    await asyncio.sleep(seconds)
    await app.http.post("/continue_generation", json={})
    return await task


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_whose_first_token_is_late_begins_and_is_kept_open_by_comments(chatting, path):
    early, late = (chatting.run(held(chatting, path, STREAMED[path], seconds)) for seconds in (14, 40))
    pings = "" if path in LINES_OF_JSON else PING.decode() * 2
    assert late.status_code == 200, late.text
    assert early.text
    assert PING.decode() not in early.text
    assert late.text.startswith(pings)
    assert PING.decode() not in late.text.removeprefix(pings)
    assert late.headers.keys() == early.headers.keys()
    assert late.text.removeprefix(pings)[:5] == early.text[:5]


def test_comments_of_a_stream_that_can_be_resumed_have_no_id():
    """OpenAI's and Anthropic's clients read a block with an id and without data as an empty event, and fail."""
    with App(resume_grace_s=60) as app:
        text = app.run(held(app, "/generate", STREAMED["/generate"], 40)).text
    *blocks, _ = text.split("\n\n")
    assert blocks[:2] == [PING.decode().strip()] * 2
    assert all(block.startswith("id: ") and "\ndata: " in block for block in blocks[2:])


@pytest.mark.parametrize(("path", "sign"), [("/generate", "deadline"), ("/v1/chat/completions", "abort")])
def test_a_request_that_fails_after_its_stream_began_says_so_in_the_stream(chatting, path, sign):
    answer = chatting.run(held(chatting, path, STREAMED[path] | {"deadline_ms": 20_000}, 40))
    assert answer.status_code == 200
    assert answer.text.startswith(PING.decode())
    assert sign in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    chatting.check_idle()


@pytest.mark.parametrize("seconds", [5, 50])
def test_a_client_that_leaves_before_the_first_token_is_forgotten(app: App, seconds):
    async def scenario():
        await app.http.post("/pause_generation", json={"mode": "in_place"})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(app.http.post("/generate", json=STREAMED["/generate"]), seconds)
        await app.http.post("/continue_generation", json={})

    app.run(scenario())
    app.check_idle()
