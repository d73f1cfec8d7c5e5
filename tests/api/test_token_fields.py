"""Fields about tokens in chats and completions, in the shapes of vLLM and SGLang. The tokenizer's ids are bytes."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from app_under_test import App, parse_events
from byte_tokenizer import EOS, VOCAB_SIZE
from fake_engine import CONTEXT_LEN, HIDDEN_SIZE, make_request
from fake_hidden_states import fake_hidden

from tureen.contract.types import FinishReason, OutputDelta, Usage
from tureen.dialects.openai.token_fields import timing
from tureen.requests import generation
from tureen.requests.timings import PromptProgress

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ROUTES = [CHAT, TEXT]


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("templates") / "last.jinja"
    file.write_text("{# <think> #}{{ messages[-1]['content'] }}")
    return str(file)


@pytest.fixture(scope="module")
def app(template):
    with App(chat_template=template) as running:
        yield running


def body_of(route: str, said: str) -> dict:
    return {"messages": [{"role": "user", "content": said}]} if route == CHAT else {"prompt": said}


def ask(app: App, route: str, said: str, status: int = 200, **fields):
    response = app.post(route, **{**body_of(route, said), "max_tokens": 20, "seed": 1, **fields})
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def stream(app: App, route: str, said: str, **fields) -> list[dict]:
    response = app.post(route, **{**body_of(route, said), "max_tokens": 40, "seed": 1, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return parse_events(response.text)


def prompt_ids(route: str, answer: dict) -> list[int]:
    """Where vLLM has them: in a chat beside the choices, in completions in each."""
    return (answer if route == CHAT else answer["choices"][0])["prompt_token_ids"]


@pytest.mark.parametrize("route", ROUTES)
def test_token_ids_are_those_of_prompt_and_output(app: App, route):
    answer = ask(app, route, "say:hé", return_token_ids=True)
    assert prompt_ids(route, answer) == list("say:hé".encode())
    assert answer["choices"][0]["token_ids"] == [*"hé".encode(), EOS]
    plain = ask(app, route, "say:hé")
    assert "token_ids" not in plain["choices"][0]
    assert "prompt_token_ids" not in plain | plain["choices"][0]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("said", ["say:hé🙂", "say:<think>well</think>yes"])
def test_a_stream_has_each_token_id_once(app: App, route, said):
    chunks = stream(app, route, said, return_token_ids=True, n=2)
    assert prompt_ids(route, chunks[0]) == list(said.encode())
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        told = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
        assert told == [*said.removeprefix("say:").encode(), EOS]
    if route == CHAT:
        assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1


@pytest.mark.parametrize("route", ROUTES)
def test_each_choice_has_the_prompt_s_ids_as_sglang_has_them(app: App, route):
    answer = ask(app, route, "say:a", return_prompt_token_ids=True, n=2)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [list(b"say:a")] * 2
    chunks = stream(app, route, "say:a", return_prompt_token_ids=True)
    assert [c["prompt_token_ids"] for chunk in chunks for c in chunk["choices"] if "prompt_token_ids" in c] == [
        list(b"say:a")
    ]


def test_a_chat_names_tokens_by_their_ids(app: App):
    asked = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    content = ask(app, CHAT, "say:hi", **asked)["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == [f"token_id:{token_id}" for token_id in (*b"hi", EOS)]
    assert [bytes(token["bytes"]) for token in content] == [b"h", b"i", b"<eos>"]
    assert all(one["token"].startswith("token_id:") for token in content for one in token["top_logprobs"])


def test_completions_name_tokens_by_their_ids(app: App):
    told = ask(app, TEXT, "say:hi", logprobs=2, return_tokens_as_token_ids=True, echo=True)["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{token_id}" for token_id in (*b"say:hi", *b"hi", EOS)]
    assert all(name.startswith("token_id:") for best in told["top_logprobs"] if best for name in best)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("route", ROUTES)
def test_prompt_logprobs_are_those_of_generate(app: App, route, count):
    answer = ask(app, route, "say:hi", prompt_logprobs=count)
    told = (answer if route == CHAT else answer["choices"][0])["prompt_logprobs"]
    meta = app.generate(
        text="say:hi",
        sampling_params={"max_new_tokens": 1, "seed": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
    )["meta_info"]
    assert told[0] is None
    for entry, (value, token_id, _), tops in zip(
        told[1:], meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True
    ):
        best = {str(top): (logprob, rank) for rank, (logprob, top, _) in enumerate(tops[:count], 1)}
        assert entry[str(token_id)]["logprob"] == value
        assert entry[str(token_id)]["decoded_token"] == chr(token_id)
        assert {name: (one["logprob"], one["rank"]) for name, one in entry.items() if name in best} == best
        assert entry.keys() == best.keys() | {str(token_id)}
    assert answer["choices"][0]["logprobs"] is None


def test_prompt_logprobs_leave_those_of_the_output_as_they_are(app: App):
    """But for the fake model's alternatives, which depend on how many there are."""
    asked = {"logprobs": True, "top_logprobs": 1}
    answers = [ask(app, CHAT, "say:hi", **asked, **more) for more in ({}, {"prompt_logprobs": 4})]
    alone, both = (answer["choices"][0]["logprobs"]["content"] for answer in answers)
    assert [(one["token"], one["logprob"]) for one in both] == [(one["token"], one["logprob"]) for one in alone]
    assert {len(one["top_logprobs"]) for one in both} == {1}
    answers = [ask(app, TEXT, "say:hi", logprobs=1, **more) for more in ({}, {"prompt_logprobs": 4})]
    alone, both = (answer["choices"][0]["logprobs"] for answer in answers)
    assert both["token_logprobs"] == alone["token_logprobs"]
    assert {len(best) for best in both["top_logprobs"]} <= {1, 2}


def test_asked_tokens_come_after_the_best(app: App):
    ids = [ord("x"), ord("h"), EOS]
    content = ask(app, CHAT, "say:hi", logprobs=True, top_logprobs=1, logprob_token_ids=ids)["choices"][0]["logprobs"]
    meta = app.generate(
        text="say:hi",
        sampling_params={"max_new_tokens": 20, "seed": 1},
        return_logprob=True,
        top_logprobs_num=1,
        token_ids_logprob=ids,
    )["meta_info"]
    rows = zip(meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True)
    for token, (top, asked) in zip(content["content"], rows, strict=True):
        expected = [top[0], *(one for one in asked if one[1] != top[0][1])]
        assert [one["logprob"] for one in token["top_logprobs"]] == [value for value, _, _ in expected]
    best = ask(app, TEXT, "say:hi", logprobs=0, logprob_token_ids=ids)["choices"][0]["logprobs"]["top_logprobs"]
    assert {"x", "h"} <= best[0].keys()


@pytest.mark.parametrize("route", ROUTES)
def test_asked_tokens_alone_come_as_the_only_alternatives(app: App, route):
    ids = [ord("x"), EOS]
    found = ask(app, route, "say:hi", logprob_token_ids=ids)["choices"][0]["logprobs"]
    asked = {"logprobs": True} if route == CHAT else {"logprobs": 0}
    assert found == ask(app, route, "say:hi", logprob_token_ids=ids, **asked)["choices"][0]["logprobs"]
    if route == CHAT:
        assert [one["token"] for token in found["content"] for one in token["top_logprobs"]] == ["x", "<eos>"] * 3
    else:
        assert [set(best) for best in found["top_logprobs"]] == [
            {"h", "x", "<eos>"},
            {"i", "x", "<eos>"},
            {"x", "<eos>"},
        ]
    chunks = stream(app, route, "say:hi", logprob_token_ids=ids)
    assert any(choice["logprobs"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("route", ROUTES)
def test_minus_one_asks_for_the_whole_vocabulary(app: App, route):
    asked = {"logprobs": True, "top_logprobs": -1} if route == CHAT else {"logprobs": -1}
    answer = ask(app, route, "say:hi", **asked, prompt_logprobs=-1, return_tokens_as_token_ids=True)
    found = answer["choices"][0]["logprobs"]
    names = {f"token_id:{token_id}" for token_id in range(VOCAB_SIZE)}
    if route == CHAT:
        tops = [{one["token"]: one["logprob"] for one in token["top_logprobs"]} for token in found["content"]]
    else:
        tops = found["top_logprobs"]
    assert [set(top) for top in tops] == [names] * 3
    first, *rest = (answer if route == CHAT else answer["choices"][0])["prompt_logprobs"]
    assert first is None
    assert [{f"token_id:{token_id}" for token_id in position} for position in rest] == [names] * 5


def test_a_prompt_of_which_only_the_end_is_scored_begins_there(app: App):
    for route in ROUTES:
        answers = [ask(app, route, "say:hi", prompt_logprobs=1, **more) for more in ({}, {"prompt_logprob_start": 3})]
        whole, end = ((one if route == CHAT else one["choices"][0])["prompt_logprobs"] for one in answers)
        assert end == [None, *whole[4:]]
    asked = {"prompt_logprobs": 1, "prompt_logprob_start": 3, "echo": True, "logprobs": 1}
    assert ask(app, TEXT, "say:hi", 400, **asked)["param"] == "prompt_logprob_start"


@pytest.mark.parametrize("route", ROUTES)
def test_where_the_cached_tokens_were_is_told_in_sglext(app: App, route):
    said = "c" * 100 + route
    ask(app, route, said)
    for more in ({}, {"n": 2}):
        answer = ask(app, route, said, return_cached_tokens_details=True, **more)
        assert answer["sglext"] == {"cached_tokens_details": {"device": 112, "host": 0}}
    *_, before, last = stream(
        app, route, said, return_cached_tokens_details=True, stream_options={"include_usage": True}
    )
    assert (before["choices"], before["sglext"]) == ([], answer["sglext"])
    assert (
        last["usage"]["prompt_tokens_details"]["cached_tokens"] == before["sglext"]["cached_tokens_details"]["device"]
    )
    assert "sglext" not in ask(app, route, said)


@pytest.mark.parametrize("route", ROUTES)
def test_the_last_position_s_hidden_state_comes_with_the_end(app: App, route):
    expected = fake_hidden(list(b"say:hi") + list(b"hi"))[-1]
    [choice] = ask(app, route, "say:hi", return_hidden_states=True)["choices"]
    assert choice["hidden_states"] == expected
    assert len(expected) == HIDDEN_SIZE
    *before, last = stream(app, route, "say:hi", return_hidden_states=True)
    assert last["choices"][0]["hidden_states"] == expected
    assert not any("hidden_states" in choice for chunk in before for choice in chunk["choices"])


@pytest.mark.parametrize("route", ROUTES)
def test_meta_info_says_what_generate_says(app: App, route):
    logprobs = {"logprobs": True, "top_logprobs": 2} if route == CHAT else {"logprobs": 2}
    [choice] = ask(app, route, "say:hi", return_meta_info=True, **logprobs)["choices"]
    told = choice["meta_info"]
    expected = app.generate(
        text="say:hi",
        sampling_params={"max_new_tokens": 20, "seed": 1},
        return_logprob=True,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )["meta_info"]
    for name in ("prompt_tokens", "completion_tokens", "sampling_seed", "weight_version", "finish_reason"):
        assert told[name] == expected[name], name
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert told[name] == expected[name], name
    assert told["e2e_latency"] > 0


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ([(100.5, "a"), (100.7, "bcd"), (101.5, "efghij")], 9 / 1.0),
        ([(100.5, "abc"), (101.0, "de")], 2 / 0.5),
        ([(100.5, "abcdefghij")], None),
    ],
    ids=["token by token", "three at first", "all in one burst"],
)
def test_the_speed_leaves_out_the_tokens_that_came_first(monkeypatch, arrivals, rate):
    now_s = 100.0
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now_s))
    output = generation.Output(make_request("x"), 0, "x")
    for now_s, text in arrivals:  # noqa: B007 - the clock reads it
        output.add(OutputDelta("x", tuple(text.encode()), text))
    expected = {"e2e_latency": now_s - 100.0, "first_token_latency": 0.5}
    assert timing(output) == pytest.approx(expected | ({} if rate is None else {"decode_throughput": rate}))


@pytest.mark.parametrize("name", ["input_ids", "prompt_token_ids"])
def test_a_chat_takes_token_ids_in_place_of_messages(app: App, name):
    answer = app.post(CHAT, **{name: list(b"say:<think>a</think>hey"), "max_tokens": 40})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("hey", "a")
    assert "x-tureen-ignored" not in answer.headers
    answer = app.post(CHAT, **{name: list(b"say:hey"), "max_tokens": 9}, **body_of(CHAT, "say:no"))
    assert answer.json()["choices"][0]["message"]["content"] == "hey"
    assert answer.headers["x-tureen-ignored"] == "messages"


def test_a_prompt_of_ids_that_ends_within_reasoning_is_gone_on_with(app: App):
    [choice] = app.post(CHAT, input_ids=list(b"abc <think>\n"), max_tokens=5, seed=1).json()["choices"]
    assert len(choice["message"]["reasoning_content"]) == 5


@pytest.mark.parametrize("route", ROUTES)
def test_a_long_prompt_keeps_its_last_tokens(app: App, route):
    answer = ask(app, route, "xxxsay:hi", truncate_prompt_tokens=6, return_token_ids=True)
    assert prompt_ids(route, answer) == list(b"say:hi")
    assert answer["usage"]["prompt_tokens"] == 6
    whole = ask(app, route, "say:hi", truncate_prompt_tokens=60, return_token_ids=True)
    assert prompt_ids(route, whole) == list(b"say:hi")
    longest = ask(app, route, "y" * (CONTEXT_LEN + 100), truncate_prompt_tokens=-1, max_tokens=8)
    assert longest["usage"]["prompt_tokens"] == CONTEXT_LEN - 8


def test_a_cut_prompt_leaves_room_for_the_default_length_of_completions(app: App):
    answer = ask(app, TEXT, "y" * (CONTEXT_LEN + 100), truncate_prompt_tokens=-1, max_tokens=16, ignore_eos=True)
    body = {"prompt": "y" * (CONTEXT_LEN + 100), "truncate_prompt_tokens": -1, "ignore_eos": True}
    usage = app.post(TEXT, **body).json()["usage"]
    assert usage["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == 16


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "more", [{"guided_regex": "a"}, {"min_tokens": 1, "stop_token_ids": [97]}], ids=["a constraint", "an end"]
)
def test_tokens_that_cannot_be_drawn_are_refused_before_anything_runs(app: App, route, more):
    prompt = {"prompt": "a"} if route == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    answer = app.post(route, **prompt, allowed_token_ids=[97], **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")
    assert app.post(route, **prompt, allowed_token_ids=[97], max_tokens=2).status_code == 200


def test_reasoning_levels_beside_token_ids_are_told(app: App):
    told = app.post(CHAT, input_ids=list(b"say:hi"), reasoning={"effort": "high"}).headers["x-tureen-ignored"]
    assert told == "reasoning"


def test_token_ids_that_are_too_many_are_cut_too(app: App):
    ids = [ord("y")] * (CONTEXT_LEN + 9) + list(b"say:hi")
    answer = app.post(TEXT, prompt=ids, truncate_prompt_tokens=6, echo=True).json()["choices"][0]
    assert answer["text"] == "say:hihi"
    answer = app.post(CHAT, input_ids=ids, truncate_prompt_tokens=6).json()["choices"][0]
    assert answer["message"]["content"] == "hi"


@pytest.mark.parametrize("route", ROUTES)
def test_an_extra_key_separates_the_prefix_cache(app: App, route):
    said = route + "z" * 100

    def cached(**fields) -> int:
        return ask(app, route, said, max_tokens=1, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(extra_key="a") == 0
    assert cached(extra_key="a") > 0
    assert cached(extra_key="b") == 0
    assert cached(extra_key=["a", "b"]) == 0
    assert cached(extra_key="a", cache_salt="s") == 0
    assert cached(extra_key=["a", "b"]) > 0
    assert cached() == 0


@pytest.mark.parametrize("route", ROUTES)
def test_an_output_that_repeats_itself_has_vllm_s_finish_reason(app: App, route):
    sent = {"max_pattern_size": 3, "min_count": 3}
    [choice] = ask(app, route, "say:xabcabcabcabc", repetition_detection=sent)["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("repetition", "repetition_detected")
    assert (choice["message"]["content"] if route == CHAT else choice["text"]) == "xabcabcabc"
    last = stream(app, route, "say:xabcabcabcabc", repetition_detection=sent)[-1]
    assert last["choices"][0]["finish_reason"] == "repetition"
    constrained = {"repetition_detection": sent, "guided_regex": "(abc)+"}
    assert ask(app, route, "say:abcabcabcabc", **constrained)["choices"][0]["finish_reason"] in ("repetition", "stop")


@pytest.mark.parametrize("route", ROUTES)
def test_timings_are_those_of_llama_cpp(app: App, route):
    said = "t" * 100 + route
    ask(app, route, said)
    answer = ask(app, route, said, timings_per_token=True)
    times, usage = answer["timings"], answer["usage"]
    assert (times["cache_n"], times["prompt_n"] + times["cache_n"]) == (112, usage["prompt_tokens"])
    assert times["predicted_n"] == usage["completion_tokens"]
    for name in ("prompt", "predicted"):
        count, spent = times[f"{name}_n"], times[f"{name}_ms"]
        assert times[f"{name}_per_token_ms"] == pytest.approx(spent / count)
        assert times[f"{name}_per_second"] == pytest.approx(1000 * count / spent if spent else 0.0)
    told = [chunk["timings"] for chunk in stream(app, route, said, timings_per_token=True)]
    assert [one["predicted_n"] for one in told] == sorted(one["predicted_n"] for one in told)
    assert told[-1]["predicted_n"] == 40
    assert len({one["prompt_ms"] for one in told}) == 1
    assert "timings" not in ask(app, route, said)


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_says_how_much_of_its_prompt_is_computed_before_its_first_token(template, route):
    said = "say:" + "h" * 96
    with App(chat_template=template, chunked_prefill_size=32) as app:
        plain = stream(app, route, said)
        app.post("/flush_cache")
        chunks = stream(app, route, said, return_progress=True, stream_interval=16)
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert [(one["total"], one["cache"], one["processed"]) for one in told] == [
            (100, 0, 32), (100, 0, 64), (100, 0, 96), (100, 0, 100),
        ]  # fmt: skip
        assert [one["time_ms"] for one in told] == sorted(one["time_ms"] for one in told)
        assert [chunk["prompt_progress"]["processed"] for chunk in chunks[:3]] == [32, 64, 96]
        texts = [text for text in map(text_of, chunks[3:]) if text]
        assert not any(map(text_of, chunks[:3]))
        assert (texts[0], len(texts[1])) == ("h", 16)  # the first token does not wait for the interval
        assert "".join(map(text_of, chunks)) == "".join(map(text_of, plain)) != ""
        assert not any("prompt_progress" in chunk for chunk in plain)
        [last] = [one for one in stream(app, route, said, return_progress=True) if "prompt_progress" in one]
        assert {**last["prompt_progress"], "time_ms": 0} == {"total": 100, "cache": 96, "processed": 100, "time_ms": 0}
        assert "prompt_progress" not in ask(app, route, said, return_progress=True)


def test_progress_leaves_the_echoed_prompt_and_its_log_probabilities_to_the_first_token():
    fields = {"echo": True, "logprobs": 1, "return_token_ids": True}
    with App(chunked_prefill_size=32) as app:
        plain = stream(app, TEXT, "say:" + "h" * 96, **fields)
        app.post("/flush_cache")
        chunks = stream(app, TEXT, "say:" + "h" * 96, return_progress=True, **fields)
    begun = [chunk for chunk in chunks if any(choice["logprobs"] for choice in chunk["choices"])]
    assert len(begun) == len(chunks) - 3
    assert [chunk["choices"] for chunk in begun] == [chunk["choices"] for chunk in plain]


def test_an_aborted_request_does_not_report_that_the_rest_of_its_prompt_is_computed():
    output = generation.Output(make_request("r", "a" * 9, reports_progress=True), 0, "r")
    progress = PromptProgress(output)
    output.add(OutputDelta("r", usage=Usage(9, 0, 0, computed_tokens=4)))
    assert progress.new()["prompt_progress"]["processed"] == 4
    output.add(OutputDelta("r", usage=Usage(9, 0, 0), finish=FinishReason(type="abort", reason="client")))
    assert progress.new() == {}


@pytest.mark.parametrize("route", ROUTES)
def test_forced_tokens_do_not_mean_that_the_prompt_is_computed(template, route):
    with App(chat_template=template, chunked_prefill_size=32) as app:
        chunks = stream(app, route, "say:" + "h" * 96, regex="abc[de]", return_progress=True)
    progress = [chunk.get("prompt_progress", {}).get("processed") for chunk in chunks]
    assert [done for done in progress if done] == [32, 64, 96, 100]
    before = "".join(map(text_of, chunks[: progress.index(64)]))
    assert before == "abc"  # sent with the first part of the prompt


def test_responses_report_that_they_say_nothing_of_progress(app: App):
    response = app.post("/v1/responses", input="say:h", max_output_tokens=2, stream=True, return_progress=True)
    assert response.headers["x-tureen-ignored"] == "return_progress"


def text_of(chunk: dict) -> str:
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in chunk["choices"])


@pytest.mark.parametrize("route", ROUTES)
def test_a_time_limit_from_the_first_token_is_refused(app: App, route):
    body = {**body_of(route, "say:a"), "max_tokens": 5}
    error = ask(app, route, "say:a", 400, t_max_predict_ms=50)
    assert (error["param"], "send deadline_ms" in error["message"]) == ("t_max_predict_ms", True)
    assert app.post(route, **body, t_max_predict_ms=0).status_code == 200


REFUSED = [
    ("logprob_token_ids", {"logprob_token_ids": [-1]}),
    ("logprob_token_ids", {"logprob_token_ids": [-1], "logprobs": 1}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("prompt_logprobs", {"prompt_logprobs": -2}),
    ("prompt_logprobs", {"prompt_logprobs": -1, "max_tokens": 2000, "n": 4}),
    ("prompt_logprob_start", {"prompt_logprob_start": 1}),
    ("prompt_logprob_start", {"prompt_logprobs": 1, "prompt_logprob_start": -1}),
    ("prompt_logprob_start", {"prompt_logprobs": 1, "prompt_logprob_start": 5}),
    ("prompt_logprobs", {"prompt_logprobs": 129}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("extra_key", {"extra_key": "x" * 1025}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
@pytest.mark.parametrize("route", ROUTES)
def test_what_cannot_be_is_refused_by_name(app: App, route, param, fields):
    if route == CHAT and "logprobs" in fields:
        fields = fields | {"logprobs": True}
    assert ask(app, route, "say:a", 400, **fields)["param"].split("[")[0] == param


BAD_PROMPTS = [
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": [-1]}),
    ("input_ids", {"input_ids": [10**6]}),
    ("input_ids", {"input_ids": [97] * (CONTEXT_LEN + 1)}),
    ("prompt_token_ids", {"input_ids": [97], "prompt_token_ids": [98]}),
    ("input_ids", {"input_ids": [97], "continue_final_message": True}),
    ("messages", {}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_PROMPTS)
def test_a_prompt_that_cannot_be_is_refused_by_name(app: App, param, fields):
    error = app.post(CHAT, **fields)
    assert error.status_code == 400
    assert error.json()["error"]["param"] == param


def test_nothing_is_left_behind(app: App):
    app.check_idle()


SAMPLED = {"max_tokens": 8, "seed": 3}
NAMES = [
    ({"repeat_penalty": 1.9}, {"repetition_penalty": 1.9}),
    ({"typ_p": 0.1}, {"typical_p": 0.1}),
    ({"n_predict": 3, "max_tokens": None}, {"max_tokens": 3}),
    ({"max_output_tokens": 3, "max_tokens": None}, {"max_tokens": 3}),
    ({"n_cmpl": 2}, {"n": 2}),
]


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize(("sent", "meant"), NAMES, ids=lambda fields: next(iter(fields)))
def test_llama_cpp_s_names_of_parameters_act(app: App, route, sent, meant):
    def made(fields):
        body = {name: value for name, value in {**SAMPLED, **fields}.items() if value is not None}
        response = app.post(route, **body_of(route, "abc"), **body, return_effective=True)
        assert (response.status_code, response.headers.get("x-tureen-ignored")) == (200, None), response.text
        return [
            (choice.get("text") or choice["message"]["content"], choice["effective"])
            for choice in response.json()["choices"]
        ]

    assert made(sent) == made(meant) != made({})
    [name], own = [name for name in sent if name != "max_tokens"], next(iter(meant))
    assert made(sent | meant) == made(meant)
    for other in (1, meant[own] + 1 if isinstance(meant[own], int) else 0.3):
        error = ask(app, route, "abc", 400, **{name: sent[name], own: other})
        assert {name, own} < set(re.split("[ ,]", error["message"]))
        assert re.search(r"is [\d.]+, but \w+, the same field, is [\d.]+; send one", error["message"])


def test_n_predict_minus_one_goes_to_the_end_of_the_context(app: App):
    for route in (CHAT, TEXT):
        response = app.post(route, **body_of(route, "abc"), n_predict=-1, seed=1)
        assert response.json()["usage"]["total_tokens"] == CONTEXT_LEN


def test_n_probs_asks_for_log_probabilities(app: App):
    chat = ask(app, CHAT, "say:hi", n_probs=2)["choices"][0]["logprobs"]["content"]
    assert chat == ask(app, CHAT, "say:hi", logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    text = ask(app, TEXT, "say:hi", n_probs=2)["choices"][0]["logprobs"]
    assert text == ask(app, TEXT, "say:hi", logprobs=2)["choices"][0]["logprobs"]
    response = app.post("/v1/responses", input="say:hi", n_probs=2).json()["output"][0]["content"][0]["logprobs"]
    assert [len(token["top_logprobs"]) for token in response] == [2] * len(response)
    assert ask(app, TEXT, "say:hi", n_probs=0)["choices"][0]["logprobs"] is None
    both = ask(app, CHAT, "say:hi", n_probs=2, top_logprobs=2, logprobs=True)
    assert both["choices"][0]["logprobs"]["content"] == chat
    assert ask(app, CHAT, "say:hi", 400, n_probs=2, top_logprobs=3, logprobs=True)["param"] == "n_probs"
