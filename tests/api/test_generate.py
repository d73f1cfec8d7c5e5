"""What a good request gets back."""

from __future__ import annotations

import asyncio

import pytest
from app_under_test import App
from byte_tokenizer import EOS, VOCAB_SIZE
from fake_engine import CONTEXT_LEN
from timeouts import until

GREEDY = {"temperature": 0, "max_new_tokens": 4}
LOGPROB_KINDS = ("token_logprobs", "top_logprobs", "token_ids_logprobs")


def test_one_prompt_gets_one_object_with_text_ids_and_facts(app: App):
    answer = app.generate(text="say:héllo", rid="mine")
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert answer["text"] == "héllo"
    assert answer["output_ids"] == [*"héllo".encode(), EOS]
    meta = answer["meta_info"]
    assert set(meta) == {
        "id",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "sampling_seed",
        "weight_version",
        "e2e_latency",
        "cached_tokens_details",
        "num_retractions",
        "sampling_temperature",
        "sampling_top_k",
        "sampling_top_p",
        "sampling_min_p",
    }
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert meta["prompt_tokens"] == len("say:héllo".encode())
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["weight_version"] == "default"
    assert 0 < meta["e2e_latency"] < 10
    assert type(meta["sampling_seed"]) is int


def test_ids_in_place_of_text_give_the_same_output(app: App):
    by_text = app.generate(text="abc", sampling_params=GREEDY)
    by_ids = app.generate(input_ids=list(b"abc"), sampling_params=GREEDY)
    assert by_ids["output_ids"] == by_text["output_ids"]
    assert by_ids["text"] == by_text["text"]


def test_a_list_is_a_batch_also_a_list_of_one(app: App):
    single = app.generate(text="abc", sampling_params=GREEDY)["output_ids"]
    assert [one["output_ids"] for one in app.generate(text=["abc"], sampling_params=GREEDY)] == [single]
    assert [one["output_ids"] for one in app.generate(input_ids=[[*b"abc"]], sampling_params=GREEDY)] == [single]
    batch = app.generate(text=["say:x", "abc", "say:y"], sampling_params=GREEDY)
    assert [one["text"] for one in batch][::2] == ["x", "y"]
    assert batch[1]["output_ids"] == single


def test_the_largest_batch_keeps_its_order(app: App):
    answers = app.generate(text=[f"say:{i}" for i in range(128)], sampling_params={"n": 4})
    assert [one["text"] for one in answers] == [str(i) for i in range(128) for _ in range(4)]


def test_each_value_may_be_given_per_prompt(app: App):
    answers = app.generate(
        text=["ab", "cde"],
        rid=["p", "q"],
        sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        return_logprob=[True, True],
        logprob_start_len=[0, 2],
        top_logprobs_num=[1, 2],
        token_ids_logprob=[[5], [6, 7]],
    )
    metas = [one["meta_info"] for one in answers]
    assert [meta["id"] for meta in metas] == ["p", "q"]
    assert [meta["completion_tokens"] for meta in metas] == [2, 3]
    assert [len(meta["input_token_logprobs"]) for meta in metas] == [2, 1]
    assert [len(meta["output_top_logprobs"][0]) for meta in metas] == [1, 2]
    assert [[entry[1] for entry in meta["output_token_ids_logprobs"][0]] for meta in metas] == [[5], [6, 7]]


def test_logprobs_may_be_asked_for_one_prompt_of_a_batch(app: App):
    first, second = app.generate(
        text=["ab", "cd"], return_logprob=[True, False], token_ids_logprob=[[5], None], sampling_params=GREEDY
    )
    assert "output_token_logprobs" in first["meta_info"]
    assert "output_token_logprobs" not in second["meta_info"]


def test_a_value_for_all_prompts_acts_on_those_that_ask_for_logprobs(app: App):
    asked = {"top_logprobs_num": 2, "token_ids_logprob": [5, 6], "logprob_start_len": 0}
    answers = app.generate(text=["ab", "cd"], return_logprob=[False, True], **asked, return_text_in_logprobs=True)
    assert "output_top_logprobs" not in answers[0]["meta_info"]
    assert len(answers[1]["meta_info"]["input_top_logprobs"]) == 2


def test_what_a_benchmark_sends_without_logprobs_is_taken(app: App):
    defaults = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": []}
    assert app.generate(text="say:a", **defaults, return_text_in_logprobs=False)["text"] == "a"


@pytest.mark.parametrize(
    "name",
    [
        "input_ids",
        "image_data",
        "lora_path",
        "sampling_params",
        "rid",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "logprobs_mode",
        "stream",
        "log_metrics",
        "priority",
        "cache_salt",
        "extra_key",
        "deadline_ms",
        "ttft_deadline_ms",
        "return_hidden_states",
        "session_params",
    ],
)
def test_null_is_the_default(app: App, name):
    assert app.generate(text="say:a", **{name: None})["text"] == "a"


def test_null_is_the_default_of_sampling_parameters_and_max_new_tokens_null_goes_to_the_context_end(app: App):
    names = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_regex", "stop_token_ids", "n", "logit_bias")
    assert app.generate(text="say:a", sampling_params=dict.fromkeys((*names, "seed", "regex")))["text"] == "a"
    answer = app.generate(text="a" * 2000, sampling_params={"max_new_tokens": None})
    assert answer["meta_info"]["completion_tokens"] == CONTEXT_LEN - 2000
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": CONTEXT_LEN - 2000}


def test_the_default_length_is_clipped_to_the_context(app: App):
    assert app.generate(text="a" * 10)["meta_info"]["completion_tokens"] == 128
    assert app.generate(text="a" * 2040)["meta_info"]["completion_tokens"] == 8


def test_an_explicit_length_up_to_the_context_end_is_taken_and_one_more_is_refused_with_the_numbers(app: App):
    answer = app.generate(text="a" * 2000, sampling_params={"max_new_tokens": 48})
    assert answer["meta_info"]["completion_tokens"] == 48
    message = app.error(text="a" * 2000, sampling_params={"max_new_tokens": 49})["message"]
    assert all(number in message for number in ("2000", "49", "2049", "2048"))


def test_no_new_tokens_scores_the_prompt(app: App):
    answer = app.generate(text="abcd", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == list(b"abcd")
    assert answer["meta_info"]["output_token_logprobs"] == []
    full = app.generate(input_ids=[1] * CONTEXT_LEN, sampling_params={"max_new_tokens": 0})
    assert full["meta_info"]["prompt_tokens"] == CONTEXT_LEN


@pytest.mark.parametrize("start", range(-1, 6))
def test_logprobs_have_the_documented_lengths_and_shapes(app: App, start):
    answer = app.generate(
        text="abcde",
        sampling_params={"max_new_tokens": 3},
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=2,
        token_ids_logprob=[7, 3, 7],
    )
    meta = answer["meta_info"]
    num_input = 0 if start < 0 else 5 - start
    for kind in LOGPROB_KINDS:
        assert len(meta[f"input_{kind}"]) == num_input
        assert len(meta[f"output_{kind}"]) == 3
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == list(b"abcde")[5 - num_input :]
    if num_input:  # nothing predicts the first
        assert meta["input_token_logprobs"][0] == [None, b"abcde"[start], None]
        assert meta["input_top_logprobs"][0] is None
        assert meta["input_token_ids_logprobs"][0] is None
    for side, entries in (("input", meta["input_token_logprobs"]), ("output", meta["output_token_logprobs"])):
        for index, (value, _, text) in enumerate(entries):
            assert text is None
            if (side, index) != ("input", 0):
                assert -11 < value < 0
                assert len(meta[f"{side}_top_logprobs"][index]) == 2
                assert [entry[1] for entry in meta[f"{side}_token_ids_logprobs"][index]] == [7, 3, 7]


def test_logprobs_do_not_depend_on_what_the_cache_holds(app: App):
    asked = {"text": "a prompt of several pages " * 8, "return_logprob": True, "sampling_params": GREEDY}
    first = app.generate(**asked, logprob_start_len=0, cache_salt="logprobs")["meta_info"]
    again = app.generate(**asked, logprob_start_len=0, cache_salt="logprobs")["meta_info"]
    late = app.generate(**asked, logprob_start_len=200, cache_salt="logprobs")["meta_info"]
    assert first["input_token_logprobs"] == again["input_token_logprobs"]
    assert first["output_token_logprobs"] == again["output_token_logprobs"]
    assert len(late["input_token_logprobs"]) == late["prompt_tokens"] - 200
    assert late["input_token_logprobs"][1:] == first["input_token_logprobs"][201:]


def test_logprobs_come_with_the_token_s_text_when_asked(app: App):
    answer = app.generate(
        text="ab", sampling_params=GREEDY, return_logprob=True, top_logprobs_num=1, return_text_in_logprobs=True
    )
    for _, token_id, text in answer["meta_info"]["output_token_logprobs"]:
        assert text == chr(token_id)
    assert isinstance(answer["meta_info"]["output_top_logprobs"][0][0][2], str)


def test_only_the_kinds_of_logprobs_that_were_asked_are_there(app: App):
    meta = app.generate(text="ab", sampling_params=GREEDY, return_logprob=True)["meta_info"]
    asked = {"input_token_logprobs", "output_token_logprobs"}
    older_names = {"prefill_token_logprobs", "decode_token_logprobs"}
    assert {name for name in meta if "logprobs" in name} == asked | older_names


def test_a_seed_is_reported_and_repeats_the_output(app: App):
    free = [app.generate(text="abc")["meta_info"]["sampling_seed"] for _ in range(2)]
    assert free[0] != free[1]
    first = app.generate(text="abc")
    again = app.generate(text="abc", sampling_params={"sampling_seed": first["meta_info"]["sampling_seed"]})
    assert again["output_ids"] == first["output_ids"]
    assert app.generate(text="abc", sampling_params={"seed": -5})["meta_info"]["sampling_seed"] == -5


def test_sample_i_has_the_seed_plus_i(app: App):
    samples = app.generate(text=["abc", "abd"], sampling_params={"n": 3, "seed": 40}, rid="r")
    assert [one["meta_info"]["sampling_seed"] for one in samples] == [40, 41, 42] * 2
    assert [one["meta_info"]["id"] for one in samples] == ["r_0_0", "r_0_1", "r_0_2", "r_1_0", "r_1_1", "r_1_2"]
    alone = app.generate(text="abd", sampling_params={"seed": 42})
    assert samples[5]["output_ids"] == alone["output_ids"]
    top = 2**63 - 1
    wrapped = app.generate(text="a", sampling_params={"n": 2, "seed": top})
    assert [one["meta_info"]["sampling_seed"] for one in wrapped] == [top, -(2**63)]


@pytest.mark.parametrize(
    ("text", "params", "expected", "reason"),
    [
        ("say:abc", {}, "abc", {"type": "stop", "matched": EOS}),
        ("say:abc", {"max_new_tokens": 2}, "ab", {"type": "length", "length": 2}),
        ("say:one two", {"stop": " t"}, "one", {"type": "stop", "matched": " t"}),
        ("say:one two", {"stop": ["o", "ne"]}, "", {"type": "stop", "matched": "o"}),
        ("say:one two", {"stop": " t", "no_stop_trim": True}, "one t", {"type": "stop", "matched": " t"}),
        ("say:a12 b", {"stop_regex": "[0-9]{2}"}, "a", {"type": "stop", "matched": "[0-9]{2}"}),
        ("say:abc", {"stop_token_ids": [98]}, "a", {"type": "stop", "matched": 98}),
        ("say:", {}, "", {"type": "stop", "matched": EOS}),
    ],
)
def test_the_finish_reason_says_what_ended_the_output(app: App, text, params, expected, reason):
    answer = app.generate(text=text, sampling_params=params)
    assert answer["text"] == expected
    assert answer["meta_info"]["finish_reason"] == reason


def test_a_stop_string_in_the_prompt_does_not_count(app: App):
    assert app.generate(text="say:xay:b", sampling_params={"stop": ":b"})["text"] == "xay"
    assert app.generate(text="say:y:c", sampling_params={"stop": "say:y"})["text"] == "y:c"


def test_a_salt_separates_the_cache(app: App):
    prompt = "p" * 100
    app.generate(text=prompt, sampling_params=GREEDY)
    assert app.generate(text=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 96
    assert app.generate(text=prompt, sampling_params=GREEDY, cache_salt="s")["meta_info"]["cached_tokens"] == 0
    assert app.generate(text=prompt, sampling_params=GREEDY, cache_salt="s")["meta_info"]["cached_tokens"] == 96


def test_priority_zero_is_always_allowed_and_others_where_the_server_honours_them(app: App):
    assert app.generate(text="say:a", priority=0)["text"] == "a"
    with App(enable_priority_scheduling=True) as other:
        assert other.generate(text="say:a", priority=-7)["text"] == "a"


def test_a_request_whose_numbers_go_wrong_fails_alone(app: App):
    async def scenario():
        bodies = [{"text": "say:abc"}, {"text": "say:a\x01b"}, {"text": "say:def"}]
        return await asyncio.gather(*(app.http.post("/generate", json=body) for body in bodies))

    first, wrong, last = app.run(scenario())
    assert (first.json()["text"], last.json()["text"]) == ("abc", "def")
    assert wrong.status_code == 500
    assert wrong.json()["error"] == {
        "message": "the model failed on this request (nan_logits); other requests continue",
        "type": "server_error",
        "param": None,
        "code": "nan_logits",
    }
    app.check_idle()


def test_a_batch_with_a_request_that_goes_wrong_fails_as_a_whole(app: App):
    assert app.post(text=["abc", "say:a\x01b", "d" * 50]).status_code == 500
    app.check_idle()


# ---- what a client does while its request runs

LONG = {"max_new_tokens": 1500}


@pytest.fixture(scope="module")
def slow():
    with App(slow=True) as running:
        yield running


async def started(app: App, **body):
    """The request's task, once the engine runs it."""
    before = app.client.stats.num_running
    task = asyncio.create_task(app.http.post("/generate", json=body))
    await until(lambda: app.client.stats.num_running != before, unless=task)
    return task


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_the_request_with_what_there_is(slow: App, stream):
    body = {"text": "abc", "deadline_ms": 3000, "sampling_params": LONG}
    answer = slow.events(**body)[-1] if stream else slow.generate(**body)
    reason = answer["meta_info"]["finish_reason"]
    assert (reason["type"], reason["reason"]) == ("abort", "deadline")
    assert 1 <= answer["meta_info"]["completion_tokens"] < LONG["max_new_tokens"]
    assert len(answer["text"]) == len(answer["output_ids"])
    slow.check_idle()


def test_a_first_token_deadline_counts_only_until_the_first_token(slow: App):
    answer = slow.generate(text="abc", ttft_deadline_ms=3000, sampling_params={"max_new_tokens": 320})
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("body", "name", "num_aborted"),
    [
        ({"text": "abc", "rid": "x"}, "x", 1),
        ({"text": ["abc", "abd"], "rid": "x"}, "x", 2),
        ({"text": ["abc", "abd"], "rid": ["x", "y"]}, "y", 1),
        ({"text": ["abc", "abd"], "rid": "x"}, "x_1", 1),
        ({"text": "abc", "rid": "x", "n": 3}, "x", 3),
        ({"text": "abc", "rid": "x", "n": 3}, "x_2", 1),
        ({"text": ["abc", "abd"], "rid": "x", "n": 2}, "x_1", 2),
        ({"text": ["abc", "abd"], "rid": "x", "n": 2}, "x_1_0", 1),
        ({"text": ["abc", "abd"], "rid": "x", "n": 2}, None, 4),
    ],
)
def test_a_request_a_batch_or_a_sample_can_be_aborted_by_name(slow: App, body, name, num_aborted):
    body = dict(body)
    params = {"max_new_tokens": 40, "n": body.pop("n", 1)}

    async def scenario():
        task = await started(slow, **body, sampling_params=params)
        await slow.client.call("pause", mode="in_place")
        near = await slow.http.post("/abort_request", json={"rid": "x_"})
        order = {"abort_all": True} if name is None else {"rid": name}
        aborted = await slow.http.post("/abort_request", json=order)
        await slow.client.call("resume")
        return near.json(), aborted.json(), (await task).json()

    near, aborted, answer = slow.run(scenario())
    assert near == {"aborted": 0}
    assert aborted == {"aborted": num_aborted}
    answers = answer if isinstance(answer, list) else [answer]
    ended = [one["meta_info"]["finish_reason"]["type"] for one in answers]
    assert sorted(ended) == ["abort"] * num_aborted + ["length"] * (len(answers) - num_aborted)
    for one in answers:
        if one["meta_info"]["finish_reason"]["type"] == "abort":
            assert len(one["output_ids"]) == one["meta_info"]["completion_tokens"] < 40
            assert one["meta_info"]["finish_reason"]["message"]
    slow.check_idle()


def test_a_rid_in_use_is_refused_and_can_be_used_again_afterwards(slow: App):
    async def scenario():
        task = await started(slow, text="abc", rid="same", sampling_params={"max_new_tokens": 30})
        await slow.client.call("pause", mode="in_place")
        second = await slow.http.post("/generate", json={"text": "abd", "rid": "same"})
        batch = await slow.http.post("/generate", json={"text": ["abd", "abe"], "rid": ["other", "same"]})
        await slow.client.call("resume")
        other = await slow.http.post("/generate", json={"text": "say:a", "rid": "other"})
        return (await task).json(), second, batch, other

    first, second, batch, other = slow.run(scenario())
    assert first["meta_info"]["completion_tokens"] == 30
    for refused in (second, batch):
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("rid", "duplicate_rid")
    assert other.status_code == 200
    for _ in range(20):
        assert slow.generate(text="say:", rid="same")["meta_info"]["id"] == "same"


def test_a_late_abort_does_not_hit_the_next_request_of_that_name(slow: App):
    slow.generate(text="say:a", rid="again")
    assert slow.post("/abort_request", rid="again").json() == {"aborted": 0}
    assert slow.generate(text="say:abc", rid="again")["text"] == "abc"


def test_a_full_queue_refuses_with_503_and_when_to_come_back():
    with App(slow=True, max_queued_requests=2) as app:

        async def scenario():
            body = {"text": "abc", "sampling_params": {"max_new_tokens": 30}}
            posts = [app.http.post("/generate", json=body) for _ in range(40)]
            return await asyncio.gather(*posts)

        responses = app.run(scenario())
        refused = [one for one in responses if one.status_code == 503]
        assert len(refused) == 40 - 16 - 2
        assert {one.status_code for one in responses} == {200, 503}
        for one in refused:
            assert one.json()["error"]["code"] == "queue_full"
            assert int(one.headers["retry-after"]) >= 1
        app.check_idle()
        assert app.request("GET", "/health").status_code == 200


def test_a_refused_request_costs_no_memory(app: App):
    for _ in range(200):
        app.error(text="a" * 2000, sampling_params={"max_new_tokens": 100})
    app.check_idle()


def test_health_facts_and_control_routes_answer(app: App):
    for path in ("/health", "/health_generate"):
        assert app.request("GET", path).status_code == 200
    card = app.request("GET", "/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("fake-model", CONTEXT_LEN)
    assert app.request("GET", "/v1/models/fake-model").json() == card
    missing = app.request("GET", "/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    facts = app.request("GET", "/model_info").json()
    assert facts == app.request("GET", "/get_model_info").json()
    assert (facts["model_path"], facts["is_generation"], facts["vocab_size"]) == ("fake", True, VOCAB_SIZE)
    server = app.request("GET", "/server_info").json()
    assert server["max_total_num_tokens"] == facts["max_total_tokens"] == 4096
    assert server["page_size"] == 16
    assert server["internal_states"][0]["num_pages"] == 256
    assert app.request("GET", "/get_server_info").status_code == 200
    assert app.request("GET", "/version").json()["version"]
    app.generate(text="q" * 64)
    assert "pages were freed" in app.post("/flush_cache").text
    app.wait_until(lambda: app.client.stats.num_cached_pages == 0)


def test_the_cache_is_not_flushed_under_a_running_request(slow: App):
    async def scenario():
        task = await started(slow, text="abc", sampling_params={"max_new_tokens": 20})
        return await slow.http.post("/flush_cache"), await task

    flushed, answer = slow.run(scenario())
    assert flushed.status_code == 400
    assert "while 1 requests run" in flushed.json()["error"]["message"]
    assert answer.status_code == 200
