"""The dialect of MindIE and vLLM on `/generate`."""

from __future__ import annotations

import json
import math

import httpx
import pytest
from app_under_test import App
from fake_engine import CONTEXT_LEN
from served_app import ServedApp
from timeouts import until

from tureen.serving.streams import merge

GREEDY = {"temperature": 0, "max_tokens": 6}
PAGE_REQUEST = {
    "prompt": "My name is Olivier and I",
    "max_tokens": 20,
    "repetition_penalty": 1.03,
    "presence_penalty": 1.2,
    "frequency_penalty": 1.2,
    "temperature": 0.5,
    "top_k": 10,
    "top_p": 0.95,
    "stream": False,
}


def texts(app, **body):
    response = app.post(**body)
    assert response.status_code == 200, response.text
    assert list(response.json()) == ["text"]
    assert response.headers["requestuuid"]
    return response.json()["text"]


def pieces(content: bytes) -> list:
    """A stream's objects: one NUL byte after each, nothing else."""
    *parts, rest = content.split(b"\0")
    assert rest == b""
    return [json.loads(part) for part in parts]


def refusal(app, status=422, **body):
    response = app.post(**body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error", "error_type"}
    assert response.headers["requestuuid"]
    return response.json()


def test_the_answer_is_a_list_of_prompt_blank_and_text(app: App):
    assert texts(app, prompt="say:hello") == ["say:hello hello"]
    assert app.post(prompt="say:é").content == '{"text":["say:é é"]}'.encode()


def test_the_request_of_the_page_works(app: App):
    [text] = texts(app, **PAGE_REQUEST)
    assert text.startswith("My name is Olivier and I ")
    assert len(text) == len("My name is Olivier and I ") + 20


def test_the_default_is_sixteen_tokens(app: App):
    [text] = texts(app, prompt="abc")
    assert len(text) == len("abc ") + 16
    [late] = texts(app, prompt="a" * (CONTEXT_LEN - 5))
    assert len(late) == CONTEXT_LEN - 5 + 1 + 5


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"max_new_tokens": 9}, {"max_tokens": 9}),
        ({"sampling_seed": 3}, {"seed": 3}),
        ({"stop": ["q"], "sampling_seed": 3}, {"stop": "q", "seed": 3}),
        ({"stop": ["q", "zz"], "sampling_seed": 3}, {"stop": ["q", "zz"], "seed": 3}),
        ({"stop_token_ids": [ord("e")], "sampling_seed": 3}, {"stop_token_ids": [ord("e")], "seed": 3}),
        ({"stop": ["q"], "no_stop_trim": True, "sampling_seed": 3},
         {"stop": "q", "include_stop_str_in_output": True, "seed": 3}),
        ({"ignore_eos": True, "sampling_seed": 3}, {"ignore_eos": True, "seed": 3}),
        ({"min_new_tokens": 5, "sampling_seed": 3}, {"min_tokens": 5, "seed": 3}),
        ({"temperature": 0}, {"temperature": 0}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prompt", ["abc", "say:one quick two"])
def test_a_parameter_means_what_it_means_in_the_other_dialect(app: App, prompt, ours, theirs):
    defaults = {"max_new_tokens": 16, "sampling_seed": 1}
    answer = app.generate(text=prompt, sampling_params=defaults | ours)
    assert texts(app, prompt=prompt, **({"seed": 1} | theirs)) == [f"{prompt} {answer['text']}"]


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
             "presence_penalty", "frequency_penalty",
             "logit_bias", "skip_special_tokens", "spaces_between_special_tokens", "seed", "max_tokens",
             "allowed_token_ids", "repetition_detection"]
)  # fmt: skip
def test_a_parameter_reaches_the_engine_under_its_name(app: App, monkeypatch, name):
    seen = []
    generate = app.client.generate
    monkeypatch.setattr(app.client, "generate", lambda request, *how: seen.append(request) or generate(request, *how))
    value = {"logit_bias": {"5": 1.5}, "top_k": 7, "skip_special_tokens": False, "max_tokens": 3, "seed": 9,
             "spaces_between_special_tokens": False, "allowed_token_ids": [97],
             "repetition_detection": {"max_pattern_size": 3, "min_count": 9}}.get(name, 0.75)  # fmt: skip
    texts(app, prompt="a", **{name: value})
    ours = {"seed": "sampling_seed", "max_tokens": "max_new_tokens"}.get(name, name)
    expected = {"logit_bias": {5: 1.5}, "allowed_token_ids": (97,)}.get(name, value)
    assert getattr(seen[0].params, ours) == expected


def test_salt_and_priority_reach_the_engine_and_a_stream_s_interval_bounds_its_pieces(monkeypatch):
    with App(enable_priority_scheduling=True) as app:
        seen, generate = [], app.client.generate
        monkeypatch.setattr(
            app.client, "generate", lambda request, *how: seen.append(request) or generate(request, *how)
        )
        texts(app, prompt="a", priority=3, cache_salt="s")
        assert (seen[0].priority, seen[0].cache_salt.split("\n")[-1]) == (3, "s")
        sent = {"prompt": "say:" + "x" * 12, "max_tokens": 12, "stream": True}
        assert [len(pieces(app.post(**sent, stream_interval=count).content)) for count in (1, 4)] == [12, 4]
    with App() as app:
        assert "--enable-priority-scheduling" in refusal(app, prompt="a", priority=3)["error"]


def test_a_top_k_beyond_the_vocabulary_keeps_every_token(app: App):
    body = {"prompt": "abc", "seed": 4}
    assert texts(app, **body, top_k=2**31 - 1) == texts(app, **body, top_k=-1)


def test_n_texts_have_the_seeds_that_follow(app: App):
    samples = texts(app, prompt="abc", seed=5, n=3)
    assert samples == [texts(app, prompt="abc", seed=5 + i)[0] for i in range(3)]


def test_best_of_are_all_returned_the_most_probable_first(app: App):
    found = texts(app, prompt="abc", seed=5, n=2, best_of=4)
    params = {"sampling_seed": 5, "n": 4, "max_new_tokens": 16}
    answers = app.generate(text="abc", sampling_params=params, return_logprob=True)
    scored = [
        (math.fsum(value for value, _, _ in answer["meta_info"]["output_token_logprobs"]), answer["text"])
        for answer in answers
    ]
    assert found == [f"abc {text}" for _, text in sorted(scored, reverse=True)]


@pytest.mark.parametrize("model", [None, "None", "fake-model"])
def test_the_served_model_may_be_named(app: App, model):
    assert texts(app, prompt="say:a", model=model) == ["say:a a"]


BAD = {
    "prompt": ["", 5, [], ["a"], {}, True, "a" * ((512 << 10) + 1)],
    "max_tokens": [0, -1, CONTEXT_LEN + 1, 1.5, "5", True, 2**64],
    "repetition_penalty": [0, -1, 2.01, "1", True],
    "presence_penalty": [-2.1, 2.1, "1"],
    "frequency_penalty": [-2.1, 2.1, "1"],
    "temperature": [-0.1, "1", True],
    "top_k": [0, -2, 1.5, 2**31, "5", True],
    "top_p": [0, 1.1, -1, "1"],
    "min_p": [-0.1, 1.1],
    "typical_p": [0, 1.1],
    "stream": [1, "true"],
    "seed": [2**64, 1.5, "x"],
    "stop": [5, [5], "", ["a"] * 65],
    "stop_token_ids": [[-1], "5", 5],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": [1],
    "spaces_between_special_tokens": [1],
    "ignore_eos": [1],
    "min_tokens": [-1, 17],
    "logit_bias": [{"5": 101}, {"x": 1}, [1]],
    "model": [5, ["other"]],
    "n": [0, 129, 1.5],
    "best_of": [0, 129, "x"],
    "maxtokens": [5],
    "logprobs": [5],
    "text_input": ["x"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in BAD for value in BAD[name]], ids=lambda v: str(v)[:30]
)
def test_a_wrong_field_is_refused_by_name_in_this_dialect_s_shape(app: App, name, value):
    error = refusal(app, **({"prompt": "a"} | {name: value}))
    assert name in error["error"]
    assert error["error_type"] == "Input Validation Error"
    assert len(error["error"]) < 300


def test_an_unknown_field_gets_a_suggestion(app: App):
    assert "did you mean 'max_tokens'?" in refusal(app, prompt="a", maxtokens=5)["error"]


def test_what_contradicts_itself_is_refused(app: App):
    assert "best_of" in refusal(app, prompt="a", n=3, best_of=2)["error"]
    assert "best_of" in refusal(app, prompt="a", best_of=2, temperature=0)["error"]
    assert str(CONTEXT_LEN) in refusal(app, prompt="a" * (CONTEXT_LEN + 1))["error"]
    assert "max_tokens" in refusal(app, prompt="a" * 2000, max_tokens=49)["error"]


@pytest.mark.parametrize("other", [{"text": "a"}, {"inputs": "a"}, {"input_ids": [1]}])
def test_a_second_prompt_is_refused_in_this_dialect_s_shape(app: App, other):
    error = refusal(app, prompt="a", **other)
    assert all(name in error["error"] for name in ("text", "input_ids", "input_embeds", "prompt", "inputs"))


def test_the_operator_bounds_max_tokens():
    with App(max_iter_times=8) as app:
        assert texts(app, prompt="abc", max_tokens=8, seed=1)[0] == texts(app, prompt="abc", seed=1)[0]
        assert "--max-iter-times" in refusal(app, prompt="abc", max_tokens=9)["error"]
        assert texts(app, prompt="abc", max_tokens=None, seed=1) == texts(app, prompt="abc", max_tokens=8, seed=1)
        most = "a" * (CONTEXT_LEN - 8)
        assert len(texts(app, prompt=most)[0]) == CONTEXT_LEN + 1
        assert str(CONTEXT_LEN - 8) in refusal(app, prompt=most + "a", max_tokens=1)["error"]


@pytest.mark.parametrize(
    ("name", "nothing", "other"),
    [("logprobs", None, 0), ("prompt_logprobs", None, 1), ("use_beam_search", False, True),
     ("early_stopping", False, "never"), ("length_penalty", 1.0, 0.5)],
)  # fmt: skip
def test_what_only_vllm_has_is_refused_with_the_reason_unless_it_asks_for_nothing(app: App, name, nothing, other):
    assert texts(app, prompt="say:a", **{name: nothing}) == ["say:a a"]
    assert f"{name} is not available" in refusal(app, prompt="a", **{name: other})["error"]


def test_best_of_needs_a_temperature_also_where_the_operator_sets_none():
    with App(preferred_sampling_params='{"temperature": 0}') as app:
        assert "best_of" in refusal(app, prompt="a", best_of=2)["error"]
        assert len(texts(app, prompt="a", best_of=2, temperature=0.5)) == 2


def test_a_stream_is_the_text_in_pieces_with_a_nul_byte_after_each():
    with ServedApp(slow=True) as server:
        with httpx.stream(
            "POST", f"{server.url}/generate", json={"prompt": "say:héllo wörld", "stream": True}
        ) as response:
            assert response.headers["content-type"] == "text/event-stream"
            assert response.headers["requestuuid"]
            content = b"".join(response.iter_raw())
        found = pieces(content)
        assert len(found) > 3
        assert "".join(one["text"][0] for one in found) == "héllo wörld"
        assert "é".encode() in content
        answer = httpx.post(f"{server.url}/generate", json={"prompt": "say:héllo wörld"}).json()
        assert answer == {"text": ["say:héllo wörld héllo wörld"]}


def test_each_text_of_several_has_its_place_in_the_pieces(app: App):
    found = pieces(app.post(prompt="abc", seed=5, n=3, max_tokens=20, stream=True).content)
    assert all(len(one["text"]) == 3 for one in found)
    joined = ["".join(one["text"][index] for one in found) for index in range(3)]
    assert [f"abc {text}" for text in joined] == texts(app, prompt="abc", seed=5, n=3, max_tokens=20)


@pytest.mark.parametrize(("switch", "front"), [("mindie_full_text", ""), ("vllm_profile", "say:hello ")])
def test_switches_make_every_piece_hold_the_text_so_far(switch, front):
    with App(slow=True, **{switch: True}) as app:
        found = [one["text"][0] for one in pieces(app.post(prompt="say:hello ", stream=True).content)]
        assert found[-1] == f"{front}hello "
        assert all(found[-1].startswith(one) and one.startswith(front) for one in found)
        assert len(found) > 2
        whole = texts(app, prompt="say:hello ")
        assert whole == (["say:hello hello "] if switch == "vllm_profile" else ["say:hello  hello "])


def test_a_stop_string_never_shows_in_a_piece(app: App):
    found = pieces(app.post(prompt="say:one two three", stop=" th", stream=True).content)
    assert "".join(one["text"][0] for one in found) == "one two"


@pytest.mark.parametrize("switches", [{}, {"mindie_full_text": True}, {"vllm_profile": True}])
def test_a_step_is_one_piece_however_many_texts_grow(switches):
    with App(slow=True, **switches) as app:
        found = pieces(app.post(prompt="abc", n=8, max_tokens=40, stream=True).content)
    assert len(found) <= 60
    assert all(len(one["text"]) == 8 for one in found)


def merged_in_one(app: App, monkeypatch):
    """Makes all tokens of an output arrive together, as they do at a reader that has no time."""
    generate = app.client.generate

    async def late(*args):
        yield merge([delta async for delta in generate(*args)])

    monkeypatch.setattr(app.client, "generate", late)


@pytest.mark.parametrize("switch", [None, "mindie_full_text"])
def test_each_token_is_a_piece_also_where_all_arrive_together(monkeypatch, switch):
    def shown(text: str) -> list[str]:
        return list(text) if switch is None else [text[: end + 1] for end in range(len(text))]

    with App(**({} if switch is None else {switch: True})) as app:
        merged_in_one(app, monkeypatch)
        for fields, text in (
            ({"prompt": "say:héllo wörld"}, "héllo wörld"),
            ({"prompt": "say:one two three", "stop": " th"}, "one two"),
            ({"prompt": "say:abc", "n": 2}, "abc"),
        ):
            found = pieces(app.post(**fields, stream=True).content)
            assert found == [{"text": [piece] * fields.get("n", 1)} for piece in shown(text)]


def test_the_operator_s_interval_bounds_the_number_of_pieces():
    with App(slow=True, stream_interval=5) as app:
        found = pieces(app.post(prompt="abc", seed=3, max_tokens=20, stream=True).content)
        assert 3 <= len(found) <= 6
        assert len(found[0]["text"][0]) == 1
        assert [f"abc {''.join(one['text'][0] for one in found)}"] == texts(app, prompt="abc", seed=3, max_tokens=20)


def test_a_stream_without_text_has_one_piece(app: App):
    assert app.post(prompt="say:", stream=True).content == b'{"text":[""]}\0'
    assert app.post(prompt="say:", stream=True, n=2).content == b'{"text":["",""]}\0'


def test_an_error_in_a_stream_is_its_last_piece(app: App):
    found = pieces(app.post(prompt="say:abc\x01def", stream=True).content)
    assert found[-1] == {
        "error": "the model failed on this request (nan_logits); other requests continue",
        "error_type": "Incomplete Generation",
    }
    assert refusal(app, 500, prompt="say:abc\x01def")["error_type"] == "Incomplete Generation"


def test_a_full_queue_says_when_to_come_back():
    with App(slow=True, max_queued_requests=1) as app:
        import asyncio

        async def scenario():
            tasks = [asyncio.create_task(app.http.post("/generate", json={"prompt": "abc", "max_tokens": 400}))
                     for _ in range(40)]  # fmt: skip
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            return next(iter(done)).result()

        response = app.run(scenario())
        assert response.status_code == 503
        assert response.json()["error_type"] == "Service Unavailable"
        assert int(response.headers["retry-after"]) >= 1


def test_a_client_that_leaves_a_stream_frees_its_place():
    with ServedApp(slow=True) as server:
        body = {"prompt": "abc", "max_tokens": 1500, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body) as response:
            next(response.iter_raw())
            assert server.stats.num_running == 1
        server.wait_until(lambda: server.stats.num_running == 0, "the abort")


def test_an_abort_is_no_complete_text():
    with App(slow=True) as app:
        import asyncio

        async def scenario():
            task = asyncio.create_task(app.http.post("/generate", json={"prompt": "abc", "max_tokens": 1500}))
            await until(lambda: app.client.stats.num_running)
            await app.http.post("/abort_request", json={"abort_all": True})
            return await task

        assert app.run(scenario()).status_code == 500


def test_eos_ends_the_text_and_can_be_ignored(app: App):
    assert texts(app, prompt="say:ab") == ["say:ab ab"]
    ends = texts(app, prompt="say:ab", ignore_eos=True, skip_special_tokens=False, max_tokens=5)[0]
    assert ends.count(ends[len("say:ab ab") :][: len(ends[len("say:ab ab") :]) // 3]) == 3
