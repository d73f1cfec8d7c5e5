"""Sessions over HTTP: what is continued, what is refused, what is left behind."""

from __future__ import annotations

import asyncio
import random
import re

import app_under_test
import pytest
from app_under_test import App
from byte_tokenizer import BOS, EOS, make_byte_tokenizer
from timeouts import until

from tureen.text.gguf_vocab import add_around

GREEDY = {"temperature": 0, "max_new_tokens": 5}
SEEDED = {"sampling_seed": 7, "max_new_tokens": 5}
ENDLESS = {"temperature": 0, "max_new_tokens": 1500}


@pytest.fixture
def slow():
    with App(slow=True) as app:
        yield app
        app.check_idle()


def open_session(app: App, **fields) -> str:
    response = app.post("/open_session", **({"capacity_of_str_len": 10_000} | fields))
    assert response.status_code == 200, response.text
    return response.json()


def ask(session: str, new, *, params=GREEDY, **fields) -> dict:
    """A body; fields of session_params among `fields`."""
    own = {name: fields.pop(name) for name in ("offset", "replace", "drop_previous_output") if name in fields}
    prompt = {"text": new} if isinstance(new, str) else {"input_ids": new}
    own |= {"id": session, "rid": fields.pop("after", None)}
    return prompt | {"sampling_params": params, "session_params": own} | fields


async def running(app: App, count: int) -> None:
    await until(lambda: app.client.stats.num_running >= count)


async def put_out(app: App, session: str, rid: str, count: int) -> None:
    """A running request has put out so many tokens."""
    nodes = app.state.sessions._open["", session].nodes
    await until(lambda: rid in nodes and len(nodes[rid].output_ids) >= count)


# -- continuing


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("seed", range(4))
def test_any_tree_of_requests_gets_what_the_full_prompts_get(app: App, params, seed):
    rng = random.Random(seed)
    session = open_session(app)
    whole: dict[str, tuple[list[int], list[int]]] = {}
    for _ in range(30):
        after = rng.choice([None, *whole, *whole])
        drop = rng.random() < 0.2
        context = []
        if after is not None:
            prompt, output = whole[after]
            context = prompt + ([] if drop else output)
        offset = rng.choice([None, 0, rng.randint(1, len(context)), -rng.randint(1, len(context))]) if context else -1
        kept = context[:offset] if offset else context
        new = [rng.randrange(97, 123) for _ in range(rng.randint(0 if kept else 1, 20))]
        body = ask(session, new, params=params, after=after, offset=offset, drop_previous_output=drop)
        answer = app.events(**body)[-1] if rng.random() < 0.3 else app.generate(**body)
        alone = app.generate(input_ids=kept + new, sampling_params=params)
        assert answer["output_ids"] == alone["output_ids"]
        assert answer["text"] == alone["text"]
        assert answer["meta_info"]["prompt_tokens"] == len(kept) + len(new)
        whole[answer["meta_info"]["id"]] = (kept + new, answer["output_ids"])
    assert app.post("/close_session", session_id=session).status_code == 200
    app.check_idle()


def test_a_turn_reuses_the_cache_of_the_one_before_and_pins_nothing(app: App):
    session = open_session(app)
    first = app.generate(**ask(session, "The first words of a conversation that goes on"))
    second = app.generate(**ask(session, " and on", after=first["meta_info"]["id"]))
    assert second["meta_info"]["cached_tokens"] >= 48
    app.check_idle()
    assert app.post("/flush_cache").status_code == 200
    assert app.client.stats.num_cached_pages == 0
    again = app.generate(**ask(session, " and on", after=first["meta_info"]["id"]))
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == second["output_ids"]


def test_a_client_that_always_sends_replace_and_an_offset_works_from_the_first_turn_on(app: App):
    session, rid, prompt = open_session(app), None, []
    for turn in ("once", " upon", " a time"):
        answer = app.generate(**ask(session, turn, after=rid, offset=-1, replace=True))
        prompt = prompt[:-1] + list(turn.encode())
        assert answer["output_ids"] == app.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]
        prompt += answer["output_ids"]
        rid = answer["meta_info"]["id"]


def test_branches_share_what_they_have_in_common_and_nothing_else(app: App):
    session = open_session(app)
    root = app.generate(**ask(session, "root", rid="root"))
    bodies = [ask(session, text, after="root", rid=text) for text in ("left", "right")]
    sides = [app.generate(**body) for body in bodies]
    ends = [app.generate(**ask(session, "!", after=side)) for side in ("left", "right")]
    for side, end, text in zip(sides, ends, ("left", "right"), strict=True):
        prompt = [*b"root", *root["output_ids"], *text.encode()]
        assert side["output_ids"] == app.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]
        prompt += [*side["output_ids"], *b"!"]
        assert end["output_ids"] == app.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_n_samples_is_a_branch_of_its_own(app: App, stream):
    session = open_session(app)
    root = app.generate(**ask(session, "root", rid="root"))
    body = ask(session, "leaf", after="root", rid="leaf", params=SEEDED | {"n": 3})
    if stream:
        ends = [event for event in app.events(**body) if event["meta_info"]["finish_reason"]]
        samples = sorted(ends, key=lambda event: event["index"])
    else:
        samples = app.generate(**body)
    prompt = [*b"root", *root["output_ids"], *b"leaf"]
    alone = app.generate(input_ids=prompt, sampling_params=SEEDED | {"n": 3})
    assert [sample["output_ids"] for sample in samples] == [sample["output_ids"] for sample in alone]
    assert [sample["meta_info"]["id"] for sample in samples] == ["leaf_0", "leaf_1", "leaf_2"]
    for sample in samples:
        end = app.generate(**ask(session, "!", after=sample["meta_info"]["id"]))
        whole = [*prompt, *sample["output_ids"], *b"!"]
        assert end["output_ids"] == app.generate(input_ids=whole, sampling_params=GREEDY)["output_ids"]


def test_n_samples_replace_once_and_stand_beside_each_other(app: App):
    session = open_session(app)
    app.generate(**ask(session, "root", rid="root"))
    app.generate(**ask(session, "old", after="root", rid="old"))
    body = ask(session, "new", after="root", rid="new", replace=True, params=SEEDED | {"n": 3})
    app.generate(**body)
    names = set(app.state.sessions._open["", session].nodes)
    assert names == {"root", "new_0", "new_1", "new_2"}


def test_a_sample_whose_name_is_taken_replaces_nothing(app: App):
    session = open_session(app)
    app.generate(**ask(session, "root", rid="root"))
    app.generate(**ask(session, "old", after="root", rid="old"))
    app.generate(**ask(session, "other", rid="new_1"))
    body = ask(session, "new", after="root", rid="new", replace=True, params=SEEDED | {"n": 3})
    assert app.error(**body)["code"] == "duplicate_rid"
    assert set(app.state.sessions._open["", session].nodes) == {"root", "old", "new_1"}


def test_an_output_with_its_end_token_is_continued_as_it_is(app: App):
    session = open_session(app)
    first = app.generate(**ask(session, "say:ab", rid="f"))
    assert first["output_ids"] == [*b"ab", EOS]
    second = app.generate(**ask(session, [], after="f", offset=-1))
    assert second["meta_info"]["prompt_tokens"] == len(b"say:abab")
    assert second["text"] == "abab"


def test_a_prompt_alone_can_be_a_turn(app: App):
    session = open_session(app)
    first = app.generate(**ask(session, "abc", params={"max_new_tokens": 0}))
    assert first["output_ids"] == []
    second = app.generate(**ask(session, "def", after=first["meta_info"]["id"]))
    assert second["output_ids"] == app.generate(text="abcdef", sampling_params=GREEDY)["output_ids"]


def test_logprobs_of_a_turn_cover_its_whole_prompt(app: App):
    session = open_session(app)
    first = app.generate(**ask(session, "abc", rid="a"))
    asked = {"return_logprob": True, "logprob_start_len": 0}
    second = app.generate(**ask(session, "de", after="a"), **asked)
    prompt = [*b"abc", *first["output_ids"], *b"de"]
    alone = app.generate(input_ids=prompt, sampling_params=GREEDY, **asked)
    for side in ("input_token_logprobs", "output_token_logprobs"):
        assert second["meta_info"][side] == alone["meta_info"][side]
    assert [triple[1] for triple in second["meta_info"]["input_token_logprobs"]] == prompt


def test_a_batch_may_continue_one_session_or_several(app: App):
    one, two = open_session(app), open_session(app)
    app.generate(**ask(one, "one", rid="r"))
    app.generate(**ask(two, "two", rid="r"))
    same = app.generate(text=["x", "y"], rid="b", sampling_params=GREEDY, session_params={"id": one, "rid": "r"})
    split = app.generate(
        text=["x", "x"],
        rid="c",
        sampling_params=GREEDY,
        session_params=[{"id": one, "rid": "r"}, {"id": two, "rid": "r", "replace": True}],
    )
    assert same[0]["output_ids"] == split[0]["output_ids"]
    assert len({tuple(answer["output_ids"]) for answer in (*same, split[1])}) == 3
    for session, rid in ((one, "b_0"), (one, "b_1"), (one, "c_0"), (two, "c_1")):
        app.generate(**ask(session, "more", after=rid))


# -- replacing


def test_replacing_drops_what_came_after_and_keeps_the_rest(app: App):
    session = open_session(app)
    app.generate(**ask(session, "root", rid="root"))
    app.generate(**ask(session, "other", rid="other"))
    for rid, after in (("child", "root"), ("grandchild", "child"), ("sibling", "root")):
        app.generate(**ask(session, rid, after=after, rid=rid))
    app.generate(**ask(session, "new", after="root", rid="child", replace=True))
    for gone in ("grandchild", "sibling"):
        assert app.error(**ask(session, "x", after=gone))["code"] == "invalid_rid"
    for kept in ("root", "other", "child"):
        app.generate(**ask(session, "x", after=kept))
    app.generate(**ask(session, "alone", replace=True, rid="alone"))
    for gone in ("root", "other", "child"):
        assert app.error(**ask(session, "x", after=gone))["code"] == "invalid_rid"
    app.generate(**ask(session, "x", after="alone"))


def test_a_turn_is_streamed_as_often_as_any_other_request(slow: App):
    params = {"temperature": 0, "max_new_tokens": 9, "stream_interval": 4}
    events = slow.events(**ask(open_session(slow), "turn", params=params))
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 5, 9]


def test_what_a_streamed_turn_has_put_out_is_known_before_its_events_are_due(slow: App):
    session = open_session(slow)

    async def scenario():
        params = ENDLESS | {"stream_interval": 1000}
        body = ask(session, "turn", rid="turn", params=params, stream=True)
        task = asyncio.create_task(slow.http.post("/generate", json=body))
        await put_out(slow, session, "turn", 3)
        await slow.http.post("/abort_request", json={"rid": "turn"})
        await task

    slow.run(scenario())


def test_a_replacement_that_is_refused_replaces_nothing(app: App):
    session = open_session(app)
    app.generate(**ask(session, "root", rid="root"))
    app.generate(**ask(session, "child", after="root", rid="child"))
    refused = [
        {"params": {"max_new_tokens": 10**6}},
        {"params": {"top_p": 7}},
        {"offset": 1000},
        {"rid": "root"},
        {"return_logprob": True, "logprob_start_len": 1000},
    ]
    for fields in refused:
        assert app.post(**ask(session, "x", after="root", replace=True, **fields)).status_code == 400, fields
    batch = {"text": ["x", "y"], "session_params": {"id": session, "rid": "root", "replace": True}}
    assert app.error(**batch)["param"] == "session_params.replace"
    app.generate(**ask(session, "x", after="child"))


def test_a_replacement_under_a_name_that_is_running_replaces_nothing(slow: App):
    session = open_session(slow)
    slow.generate(**ask(session, "root", rid="root"))

    async def scenario():
        busy = {"text": "abc", "rid": "busy", "sampling_params": ENDLESS}
        task = asyncio.create_task(slow.http.post("/generate", json=busy))
        await running(slow, 1)
        refused = await slow.http.post("/generate", json=ask(session, "x", rid="busy", replace=True))
        await slow.http.post("/abort_request", json={"rid": "busy"})
        await task
        return refused.json()["error"]["code"]

    assert slow.run(scenario()) == "duplicate_rid"
    slow.generate(**ask(session, "x", after="root"))


def test_a_draining_server_replaces_nothing(app: App):
    session = open_session(app)
    app.generate(**ask(session, "root", rid="root"))
    app.state.lifecycle.is_draining = True
    assert app.post(**ask(session, "x", replace=True)).status_code == 503
    app.state.lifecycle.is_draining = False
    app.generate(**ask(session, "x", after="root"))


def test_running_requests_below_a_replaced_one_are_aborted_and_others_go_on(slow: App):
    session = open_session(slow)
    slow.generate(**ask(session, "root", rid="root"))
    slow.generate(**ask(session, "child", after="root", rid="child"))

    async def scenario():
        post = slow.http.post
        below = asyncio.create_task(post("/generate", json=ask(session, "x", after="child", params=ENDLESS)))
        beside = asyncio.create_task(post("/generate", json=ask(session, "y", rid="beside", params=ENDLESS)))
        await running(slow, 2)
        new = await post("/generate", json=ask(session, "new", after="root", rid="new", replace=True))
        ended = await below
        assert not beside.done()
        await post("/abort_request", json={"rid": "beside"})
        return new.json(), ended.json(), (await beside).json()

    new, ended, beside = slow.run(scenario())
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(beside["output_ids"]) > len(ended["output_ids"])
    assert new["meta_info"]["finish_reason"]["type"] == "length"
    assert slow.error(**ask(session, "x", after=ended["meta_info"]["id"]))["code"] == "invalid_rid"
    for rid in ("root", "new", "beside"):
        slow.generate(**ask(session, "x", after=rid))


def test_replacing_after_a_running_request_ends_it_and_continues_what_it_had_put_out(slow: App):
    session = open_session(slow)

    async def scenario():
        post = slow.http.post
        first = asyncio.create_task(post("/generate", json=ask(session, "abc", rid="first", params=ENDLESS)))
        await put_out(slow, session, "first", 3)
        refused = await post("/generate", json=ask(session, "x", after="first"))
        second = await post("/generate", json=ask(session, "def", after="first", offset=4, replace=True))
        return refused, (await first).json(), second.json()

    refused, first, second = slow.run(scenario())
    assert refused.status_code == 400
    assert "Session request is appending to a request that hasn't finished." in refused.text
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    prompt = [*b"abc", *first["output_ids"]]
    alone = slow.generate(input_ids=[*prompt[:4], *b"def"], sampling_params=GREEDY)
    assert second["output_ids"] == alone["output_ids"]
    third = slow.generate(**ask(session, "ghi", after="first"))
    assert third["output_ids"] == slow.generate(input_ids=[*prompt, *b"ghi"], sampling_params=GREEDY)["output_ids"]


# -- requests that end early


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_that_was_cut_is_continued_from_where_it_was(slow: App, how):
    session = open_session(slow)
    body = ask(session, "abc", rid="cut", params=ENDLESS) | ({"deadline_ms": 2000} if how == "deadline" else {})

    async def scenario():
        task = asyncio.create_task(slow.http.post("/generate", json=body))
        if how == "abort":
            await put_out(slow, session, "cut", 3)
            await slow.http.post("/abort_request", json={"rid": "cut"})
        return (await task).json()

    cut = slow.run(scenario())
    assert cut["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(cut["output_ids"]) < 1500
    more = slow.generate(**ask(session, "def", after="cut"))
    prompt = [*b"abc", *cut["output_ids"], *b"def"]
    assert more["output_ids"] == slow.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]


def test_a_request_that_failed_leaves_its_name_free(app: App):
    session = open_session(app)
    for stream in (False, True):
        assert "failed" in app.post(**ask(session, "say:a\x01b", rid="x", stream=stream)).text
        assert app.error(**ask(session, "x", after="x"))["code"] == "invalid_rid"
    held = app.state.sessions.num_tokens
    app.generate(**ask(session, "abc", rid="x"))
    assert app.state.sessions.num_tokens == held + 3 + 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_left_leaves_nothing(slow: App, stream):
    session = open_session(slow)

    async def scenario():
        body = ask(session, "abc", rid="x", params=ENDLESS, stream=stream)
        task = asyncio.create_task(slow.http.post("/generate", json=body))
        await running(slow, 1)
        assert (await slow.http.post("/generate", json=ask(session, "x", after="x"))).status_code == 400
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    slow.run(scenario())
    slow.check_idle()
    assert slow.error(**ask(session, "x", after="x"))["code"] == "invalid_rid"
    slow.generate(**ask(session, "abc", rid="x"))


def test_closing_lets_running_requests_end_and_forgets_them(slow: App):
    session = open_session(slow)

    async def scenario():
        body = ask(session, "abc", params={"temperature": 0, "max_new_tokens": 30})
        task = asyncio.create_task(slow.http.post("/generate", json=body))
        await running(slow, 1)
        await slow.http.post("/close_session", json={"session_id": session})
        assert not task.done()
        return (await task).json()

    assert len(slow.run(scenario())["output_ids"]) == 30
    assert (len(slow.state.sessions), slow.state.sessions.num_tokens) == (0, 0)


# -- the first token of a text


@pytest.fixture
def bos_app(monkeypatch):
    def make():
        tokenizer = make_byte_tokenizer()
        add_around(tokenizer._backend, BOS, None)
        return tokenizer

    monkeypatch.setattr(app_under_test, "make_byte_tokenizer", make)
    with App() as app:
        yield app


def test_the_token_before_every_text_stands_once_before_a_conversation(bos_app: App):
    session = open_session(bos_app)
    first = bos_app.generate(**ask(session, "abc", rid="a"))
    assert first["meta_info"]["prompt_tokens"] == 4
    prompt = [BOS, *b"abc", *first["output_ids"], *b"de"]
    alone = bos_app.generate(input_ids=prompt, sampling_params=GREEDY)
    for new in ("de", [BOS, *b"de"], [*b"de"]):
        second = bos_app.generate(**ask(session, new, after="a"))
        assert second["meta_info"]["prompt_tokens"] == len(prompt)
        assert second["output_ids"] == alone["output_ids"]
    afresh = bos_app.generate(**ask(session, "de", after="a", offset=-9))
    assert afresh["meta_info"]["prompt_tokens"] == 3
    twice = bos_app.generate(**ask(session, [BOS, BOS, *b"de"], after="a"))
    assert twice["meta_info"]["prompt_tokens"] == len(prompt) + 1


def test_a_first_token_that_the_tokenizer_does_not_add_is_the_client_s_own(app: App):
    session = open_session(app)
    first = app.generate(**ask(session, "abc", rid="a"))
    second = app.generate(**ask(session, "<bos>de", after="a"))
    prompt = [*b"abc", *first["output_ids"], BOS, *b"de"]
    assert second["meta_info"]["prompt_tokens"] == len(prompt)
    assert second["output_ids"] == app.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]


# -- what is refused


def test_bad_bodies_are_refused_by_the_field_s_name(app: App):
    before = len(app.state.sessions)
    bad = {
        "capacity_of_str_len": [None, 0, -1, 1.5, "10", True, 2**60, 10**400],
        "session_id": ["", "x" * 257, "é", "a\n", 5, ["a"]],
        "timeout": [0, -1, "5", 3601, True, [1]],
        "streaming": [True, 1, "yes"],
        "capacity": [5],
    }
    for field, values in bad.items():
        for value in values:
            response = app.post("/open_session", **({"capacity_of_str_len": 10} | {field: value}))
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field), (field, value, error)
            assert field in error["message"]
    for body in ({}, {"session_id": None}, {"session_id": 5}, {"session_id": "a", "x": 1}):
        assert app.post("/close_session", **body).status_code == 400, body
    assert app.request("POST", "/open_session", content=b"[]").status_code == 400
    assert len(app.state.sessions) == before


def test_sessions_are_opened_by_get_too_under_names_that_nobody_can_guess(app: App):
    names = {app.request("GET", "/open_session", json={"capacity_of_str_len": 9}).json() for _ in range(50)}
    assert len(names) == 50
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)
    for name in names:
        closed = app.request("GET", "/close_session", json={"session_id": name})
        assert (closed.status_code, closed.content) == (200, b"")


def test_a_name_is_taken_while_its_session_is_open(app: App):
    assert open_session(app, session_id="mine") == "mine"
    again = app.post("/open_session", capacity_of_str_len=5, session_id="mine")
    assert again.status_code == 400
    assert again.json()["error"]["message"] == (
        "Failed to open the session. Check if a session with the same id is still open."
    )
    assert app.post("/close_session", session_id="mine").status_code == 200
    assert app.post("/close_session", session_id="mine").status_code == 404
    assert app.post(**ask("mine", "abc")).status_code == 404
    assert open_session(app, session_id="mine") == "mine"
    app.post("/close_session", session_id="mine")


def test_each_refusal_of_a_turn_says_what_is_wrong(app: App):
    session = open_session(app)
    app.generate(**ask(session, "abcdef", rid="six"))
    cases = [
        ("session_params.rid", "'seven'", ask(session, "x", after="seven")),
        ("session_params.rid", "''", ask(session, "x", after="")),
        ("session_params.offset", "is 12, but request 'six' has 11 tokens", ask(session, "x", after="six", offset=12)),
        ("session_params.offset", "is -12, ", ask(session, "x", after="six", offset=-12)),
        ("session_params.offset", "has 6 tokens", ask(session, "x", after="six", offset=7, drop_previous_output=True)),
        ("session_params.offset", "bits", ask(session, "x", after="six", offset=10**300)),
        ("rid", "'six'", ask(session, "x", rid="six")),
        ("rid", "'six'", ask(session, "x", after="six", rid="six", replace=True)),
        ("input_ids", "empty", ask(session, [])),
        ("input_ids", "empty", ask(session, [], after="six", offset=-11)),
        ("session_params.replace", "expected bool", ask(session, "x", replace=1)),
        ("text", "context length", ask(session, "x" * 2047, after="six")),
    ]
    for param, words, body in cases:
        error = app.error(**body)
        assert error["param"] == param, error
        assert words in error["message"], error
    missing = app.post(**ask("nobody", "x"))
    assert missing.status_code == 404
    assert "Invalid request: session id 'nobody' does not exist" in missing.json()["error"]["message"]
    app.generate(**ask(session, [], after="six"))


def test_characters_are_counted_as_they_are_read(app: App):
    session = open_session(app, capacity_of_str_len=12)
    first = app.generate(**ask(session, "say:é🙂", rid="a", params={"max_new_tokens": 20}))
    assert (first["text"], len(first["output_ids"])) == ("é🙂", 7)
    app.generate(**ask(session, "é" * 4, after="a"))
    error = app.error(**ask(session, "é" * 5, after="a"))
    assert error["code"] == "session_capacity_exceeded"
    assert "13 characters" in error["message"]
    assert "12 (its capacity_of_str_len)" in error["message"]
    app.generate(**ask(session, "é" * 6, after="a", drop_previous_output=True))
    app.generate(**ask(session, "x" * 7, after="a", offset=6, rid="b"))  # "say:" and "é", a character of two tokens
    assert app.error(**ask(session, "x" * 8, after="a", offset=6))["code"] == "session_capacity_exceeded"
    app.generate(**ask(session, "x" * 2, after="b", offset=11))
    assert app.error(**ask(session, "x" * 3, after="b", offset=11))["code"] == "session_capacity_exceeded"
    app.generate(**ask(session, "x" * 12))
