"""What a chat asks about reasoning: its levels, its budget, how it is streamed; and the modality of pictures."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import pytest
from app_under_test import App, parse_events
from openai_judge import judge

from tureen.contract.types import FinishReason
from tureen.errors import RequestFailed
from tureen.requests.generation import Output
from tureen.requests.output_parser import Reading
from tureen.requests.thinking_budget import BudgetedRun
from tureen.text.messages import Content, Reasoning
from tureen.text.reasoning import FORMATS
from tureen.text.tools import PARSERS

PATH = "/v1/chat/completions"
LEVELS = "{# <think> #}say:{{ reasoning_effort }}{{ enable_thinking }}"
MARK = "\n</think>\n\n"


def make_app(folder, template: str) -> App:
    file = folder / "template.jinja"
    file.write_text(template)
    return App(chat_template=str(file))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with make_app(tmp_path_factory.mktemp("plain"), "{{ messages[-1]['content'] }}") as running:
        yield running


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    with make_app(tmp_path_factory.mktemp("levels"), LEVELS) as running:
        yield running


@pytest.fixture(scope="module")
def switching(tmp_path_factory):
    with make_app(tmp_path_factory.mktemp("switching"), "{# <think> #}say:{{ enable_thinking }}") as running:
        yield running


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    with make_app(tmp_path_factory.mktemp("last"), "{# <think> #}{{ messages[-1]['content'] }}") as running:
        yield running


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A model whose output begins within its reasoning, and whose thoughts never end by themselves."""
    with make_app(tmp_path_factory.mktemp("thinking"), "{# <think> #}abc<think>") as running:
        yield running


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    """A model whose output begins within its reasoning, and that says what it is asked to."""
    template = "{# <think> #}{{ messages[-1]['content'] }}"
    file = tmp_path_factory.mktemp("inside") / "template.jinja"
    file.write_text(template)
    with App(chat_template=str(file), reasoning_parser="deepseek-r1") as running:
        yield running


def post(app: App, said: str = "say:a", **body):
    return app.post(PATH, **{"messages": [{"role": "user", "content": said}], "max_tokens": 60, "seed": 1, **body})


def choice(app: App, said: str = "say:a", **body) -> dict:
    response = post(app, said, **body)
    assert response.status_code == 200, response.text
    judge(response.json())
    return response.json()["choices"][0]


def content(app: App, **body) -> str:
    return choice(app, **body)["message"]["content"]


@pytest.mark.parametrize("level", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_a_template_that_knows_levels_gets_the_level(levels, level):
    assert content(levels, reasoning_effort=level) == level
    assert content(levels, reasoning={"effort": level}) == level
    assert "x-tureen-ignored" not in post(levels, reasoning_effort=level).headers


def test_a_level_that_the_template_does_not_know_is_told(plain):
    for fields, name in (
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ):
        answer = post(plain, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-tureen-ignored"] == name
        assert answer.json()["choices"][0]["message"]["content"] == "a"
    assert "x-tureen-ignored" not in post(plain, reasoning_effort="none").headers


def test_a_model_that_thinks_all_the_same_refuses_not_to(last):
    answer = post(last, reasoning_effort="none")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")
    assert "leave the field out, or serve a model that can switch reasoning" in answer.json()["error"]["message"]


def test_thinking_as_hosted_models_have_it_switches_the_template(switching):
    for kind, read in (("enabled", "True"), ("disabled", "False"), ("adaptive", "")):
        assert content(switching, thinking={"type": kind}) == read
    response = switching.post("/v1/responses", input="a", thinking={"type": "disabled"}, max_output_tokens=9)
    assert response.json()["output"][-1]["content"][0]["text"] == "False"
    more = {"chat_template_kwargs": {"enable_thinking": True}}
    error = post(switching, thinking={"type": "disabled"}, **more).json()["error"]
    assert error["param"] == "thinking"


def test_thinking_of_a_model_that_cannot_switch_it(plain, last):
    assert "x-tureen-ignored" not in post(plain, thinking={"type": "disabled"}).headers
    answer = post(plain, thinking={"type": "enabled", "budget_tokens": 9})
    assert answer.headers["x-tureen-ignored"] == "thinking.budget_tokens, thinking.type"
    error = post(last, thinking={"type": "disabled"}).json()["error"]
    assert (error["param"], "send a chat to" in error["message"]) == ("thinking.type", False)
    answer = plain.post("/v1/completions", prompt="say:a", max_tokens=2, thinking={"type": "disabled"})
    assert answer.status_code == 200


def test_two_levels_are_refused_unless_they_are_equal(levels):
    for other, message in (
        (
            {"reasoning_effort": "high"},
            "reasoning.effort is 'low', but reasoning_effort, the same field, is 'high'; send one",
        ),
        (
            {"chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning.effort 'low' contradicts chat_template_kwargs.reasoning_effort 'high'; send one",
        ),
    ):
        error = post(levels, reasoning={"effort": "low"}, **other).json()["error"]
        assert (error["param"], error["message"]) == ("reasoning.effort", message)
    alone = post(levels, reasoning_effort="low").json()["choices"][0]["message"]
    equal = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}
    assert post(levels, reasoning={"effort": "low"}, **equal).json()["choices"][0]["message"] == alone


END = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>The user asks.{END}"
SEVEN = "<|channel|>final<|message|>It is 7."
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    template = "{# <|channel|>analysis<|message|> #}{% if tools %}{% endif %}{{ messages[-1]['content'] }}"
    with make_app(tmp_path_factory.mktemp("harmony"), template) as running:
        yield running


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}])
@pytest.mark.parametrize(
    ("said", "thought", "answer"),
    [
        (THOUGHT + SEVEN, "The user asks.", "It is 7."),
        (SEVEN, None, "It is 7."),
        (THOUGHT[:44], "The user asks.", None),
    ],
)
def test_channels_of_gpt_oss_are_reasoning_and_answer_with_tools_and_without(harmony, tools, said, thought, answer):
    said = f"say:{said}"
    message = choice(harmony, said, max_tokens=200, **tools)["message"]
    assert (message["reasoning_content"], message["content"] or None) == (thought, answer)
    pieces = [one["delta"] for one in stream(harmony, said, max_tokens=200, **tools)]
    joined = ["".join(one.get(name) or "" for one in pieces) for name in ("reasoning_content", "content")]
    assert joined == [thought or "", answer or ""]


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (f"Hm.{END}{SEVEN}", [Reasoning("Hm."), Content("It is 7.")]),
        ("Hm.", [Reasoning("Hm.")]),
    ],
)
def test_thoughts_of_gpt_oss_that_begin_in_the_prompt_are_reasoning(said, parts):
    reading = Reading(reasoning=FORMATS["gpt-oss"], tool_format=PARSERS["gpt-oss"], starts_inside=True)
    output = SimpleNamespace(text=said, token_ids=[], finish=FinishReason(type="stop"))
    assert reading.reader().catch_up(output) == parts


def test_channels_of_gpt_oss_stay_in_the_answer_where_that_is_asked_for(harmony):
    message = choice(harmony, f"say:{THOUGHT}{SEVEN}", max_tokens=200, separate_reasoning=False)["message"]
    assert message["content"].endswith("<|end|><|start|>assistant\n\nIt is 7.")
    assert "The user asks." in message["content"]


def test_a_call_of_gpt_oss_follows_its_reasoning(harmony):
    called = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    message = choice(harmony, f"say:{THOUGHT}{called}", max_tokens=200, tools=TOOLS)["message"]
    assert message["reasoning_content"] == "The user asks."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def stream(app: App, said: str = "say:a", **body) -> list[dict]:
    response = post(app, said, stream=True, **body)
    assert response.status_code == 200, response.text
    found = parse_events(response.text)
    for chunk in found:
        judge(chunk, is_chunk=True)
    return [choice for chunk in found for choice in chunk["choices"]]


@pytest.mark.parametrize("said", ["<think>well, well</think>yes", "<think>never done", "yes"])
def test_reasoning_is_streamed_in_one_piece_where_that_is_asked_for(last, said):
    pieces = stream(last, f"say:{said}", stream_reasoning=False, logprobs=True)
    thoughts = [one["delta"]["reasoning_content"] for one in pieces if one["delta"].get("reasoning_content")]
    usual = stream(last, f"say:{said}", logprobs=True)
    whole = "".join(one["delta"].get("reasoning_content") or "" for one in usual)
    assert thoughts == ([whole] if whole else [])
    for name in ("content",):
        assert "".join(one["delta"].get(name) or "" for one in pieces) == "".join(
            one["delta"].get(name) or "" for one in usual
        )
    assert [token for one in pieces for token in (one["logprobs"] or {"content": []})["content"]] == [
        token for one in usual for token in (one["logprobs"] or {"content": []})["content"]
    ]


@pytest.mark.parametrize("budget", [1, 5, 20])
def test_reasoning_ends_with_its_budget_and_the_answer_follows(thinking, budget):
    answer = post(thinking, thinking_token_budget=budget).json()
    message = answer["choices"][0]["message"]
    assert len(message["reasoning_content"]) == budget
    assert len(message["content"]) == 60 - budget - len(MARK)
    assert answer["usage"]["completion_tokens"] == 60
    pieces = stream(thinking, thinking_token_budget=budget)
    assert "".join(one["delta"]["reasoning_content"] or "" for one in pieces) == message["reasoning_content"]
    assert "".join(one["delta"].get("content") or "" for one in pieces) == message["content"]
    thinking.check_idle()


def test_a_budget_that_is_not_used_up_changes_nothing(last):
    said = "say:<think>hm</think>yes"
    assert choice(last, said, thinking_token_budget=50) == choice(last, said)


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_mark_that_a_budget_appends_is_explained_by_the_budget(thinking, logprobs):
    asked = {"explain": True, "logprobs": logprobs, "thinking_token_budget": 5}
    explained = choice(thinking, **asked)["explanations"]
    token_ids = post(thinking, **asked, return_token_ids=True).json()["choices"][0]["token_ids"]
    assert [why["token_id"] for why in explained] == token_ids
    assert [why["chosen_by"] == "budget" for why in explained] == [5 <= at < 5 + len(MARK) for at in range(60)]
    assert [why["position"] - explained[0]["position"] for why in explained] == list(range(60))
    assert [why for one in stream(thinking, **asked) for why in one.get("explanations", ())] == explained


def test_every_token_of_a_budgeted_output_has_its_log_probability(thinking):
    asked = {"logprobs": True, "top_logprobs": 1, "thinking_token_budget": 5}
    tokens = choice(thinking, **asked)["logprobs"]["content"]
    assert len(tokens) == 60
    token_ids = post(thinking, **asked, return_token_ids=True).json()["choices"][0]["token_ids"]
    assert [token["bytes"][0] for token in tokens] == token_ids
    assert bytes(token_ids[5 : 5 + len(MARK)]).decode() == MARK
    assert all(token["logprob"] is not None for token in tokens)
    pieces = [token for one in stream(thinking, **asked) for token in (one["logprobs"] or {"content": []})["content"]]
    assert pieces == tokens


def test_the_rest_of_a_budgeted_output_has_what_is_left_of_its_deadline(thinking, monkeypatch):
    requests = []
    generate = thinking.client.generate

    def noted(request, *more):
        requests.append(request)
        return generate(request, *more)

    monkeypatch.setattr(thinking.client, "generate", noted)
    limits = {"deadline_ms": 60_000, "ttft_deadline_ms": 50_000}
    assert post(thinking, thinking_token_budget=5, **limits).status_code == 200
    first, rest = requests
    assert rest.deadline_ms < first.deadline_ms
    assert first.ttft_deadline_ms is not None
    assert rest.ttft_deadline_ms is None


def test_a_budget_makes_no_answer_longer_than_its_limit(thinking):
    answer = post(thinking, thinking_token_budget=5, max_tokens=0).json()
    assert answer["usage"]["completion_tokens"] == 0


def test_a_constraint_holds_after_the_budget(thinking):
    assert re.fullmatch("[xy]{3}", content(thinking, thinking_token_budget=4, regex="[xy]{3}"))


@pytest.mark.parametrize("thought", ["hm</think>z", "hm"])
def test_a_constrained_answer_is_not_cut_by_the_budget_of_its_thoughts(inside, thought):
    """Whether the thoughts end before their budget or the model wants to end within them."""
    answer = post(inside, f"say:{thought}", thinking_token_budget=12, regex="[xy]{30}", logprobs=True).json()
    [one] = answer["choices"]
    assert one["message"]["reasoning_content"] == "hm"
    assert re.fullmatch("[xy]{30}", one["message"]["content"])
    assert one["finish_reason"] == "stop"
    assert len(one["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    pieces = stream(inside, f"say:{thought}", thinking_token_budget=12, regex="[xy]{30}")
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == one["message"]["content"]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_thoughts_end_before_their_budget_where_the_answer_needs_the_room(thinking, limit):
    """Of 60 tokens 30 are the answer's and some the mark's; the budget is the most that may be thought."""
    asked = {"thinking_token_budget": 30, "regex": "[xy]{30}", "max_tokens": None, limit: 60}
    answer = post(thinking, **asked).json()
    [one] = answer["choices"]
    assert len(one["message"]["reasoning_content"]) == 60 - 30 - len(MARK)
    assert re.fullmatch("[xy]{30}", one["message"]["content"])
    assert (one["finish_reason"], answer["usage"]["completion_tokens"] <= 61) == ("stop", True)
    pieces = stream(thinking, **asked)
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == one["message"]["content"]
    enough = post(thinking, **asked | {limit: 90}).json()["choices"][0]["message"]
    assert len(enough["reasoning_content"]) == 30


def test_thoughts_that_end_by_themselves_are_not_counted_as_their_budget(inside):
    """They and their end take 10 tokens, and 40 are the answer's; the whole budget would leave it 1."""
    asked = {"thinking_token_budget": 50, "regex": "[xy]{40}", "max_tokens": 62}
    message = choice(inside, "say:hm</think>z", **asked)["message"]
    assert re.fullmatch("[xy]{40}", message["content"])
    assert message["reasoning_content"] == "hm"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_constraint_that_has_no_room_behind_any_thought_is_refused_at_once_by_the_field_sent(thinking, stream, limit):
    body = {"messages": [{"role": "user", "content": "a"}], "thinking_token_budget": 30, "regex": "[xy]{30}"}
    before = thinking.metrics()["generation_tokens_total"]
    most = 30 + len(MARK)
    refused = thinking.post(PATH, **body, **{limit: most}, stream=stream)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, limit)
    assert f"{limit} {most} leaves 29 tokens for the answer" in error["message"]
    assert "regex allows takes 30 tokens" in error["message"]
    assert thinking.metrics()["generation_tokens_total"] == before
    assert thinking.post(PATH, **body, **{limit: most + 1}, stream=stream).status_code == 200


def test_a_constraint_that_cannot_be_compiled_is_refused_before_anything_is_thought(thinking):
    body = {"messages": [{"role": "user", "content": "a"}], "thinking_token_budget": 30}
    refused = thinking.post(PATH, **body, ebnf="root ::= missing", stream=True, max_tokens=90)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ebnf")


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1}, {"regex": "[xy]{9}"}])
def test_each_of_several_choices_has_the_budget_and_is_as_it_is_alone(thinking, more):
    asked = {"thinking_token_budget": 5, "temperature": 1.0, "max_tokens": 40, **more}
    answer = post(thinking, **asked, n=3, seed=7).json()
    alone = [post(thinking, **asked, seed=7 + index).json() for index in range(3)]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    assert [{**one, "index": 0} for one in answer["choices"]] == [one["choices"][0] for one in alone]
    tokens = [one["usage"]["completion_tokens"] for one in (answer, *alone)]
    assert tokens[0] == sum(tokens[1:])
    pieces = stream(thinking, **asked, n=3, seed=7)
    for choice in answer["choices"]:
        own = [one for one in pieces if one["index"] == choice["index"]]
        assert "".join(one["delta"].get("content") or "" for one in own) == choice["message"]["content"]
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [choice["finish_reason"]]
    thinking.check_idle()


def test_several_budgeted_choices_are_aborted_by_the_one_name_of_their_answer(thinking, monkeypatch):
    aborted = []
    monkeypatch.setattr(thinking.client, "abort", lambda request_id, reason="client": aborted.append(request_id))
    plan_ids = []
    generate = thinking.client.generate

    def noted(request, *more):
        plan_ids.append(request.id)
        if len(plan_ids) == 3:
            assert thinking.app.state.server.abort("mine", owner="") == 1
        return generate(request, *more)

    monkeypatch.setattr(thinking.client, "generate", noted)
    assert post(thinking, thinking_token_budget=5, n=3, rid="mine").status_code == 200
    assert aborted == plan_ids[:3]


@pytest.mark.parametrize("error", [RequestFailed("the device is gone", code="device_lost"), RuntimeError("a slip")])
def test_several_budgeted_choices_end_when_one_of_them_fails_whatever_it_fails_of(thinking, monkeypatch, error):
    """A slip of ours would else keep the client waiting for ever, and the other choices running."""
    updates = BudgetedRun._updates

    async def failing(self, interval):
        async with contextlib.aclosing(updates(self, interval)) as outputs:
            async for output in outputs:
                yield output
                if output.index == 1:
                    raise error

    monkeypatch.setattr(BudgetedRun, "_updates", failing)
    assert post(thinking, thinking_token_budget=5, n=3).status_code == 500
    thinking.check_idle()


def test_a_limit_that_leaves_the_answer_nothing_is_told_as_nothing(thinking):
    refused = post(thinking, thinking_token_budget=1, max_tokens=2, regex="[xy]{30}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert "leaves 0 tokens" in refused.json()["error"]["message"]


def test_a_budget_that_cannot_be_is_refused(thinking):
    answer = post(thinking, thinking_token_budget=0)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")


def test_a_budget_of_a_model_that_does_not_think_is_reported(plain):
    answer = post(plain, thinking_token_budget=5)
    assert (answer.status_code, answer.headers["x-tureen-ignored"]) == (200, "thinking_token_budget")
    for more in ({"require_reasoning": True}, {"max_thinking_tokens": 5}):
        params = {"max_new_tokens": 9, "regex": "[xy]{4}"}
        answer = plain.post("/generate", text="say:a", sampling_params=params, **more)
        assert (answer.status_code, answer.headers["x-tureen-ignored"]) == (200, *more)
        assert re.fullmatch("[xy]{4}", answer.json()["text"])
    answer = plain.post("/v1/completions", prompt="a", thinking_token_budget=5)
    assert answer.json()["error"]["param"] == "thinking_token_budget"


# ---- the native API


@pytest.mark.parametrize("how", [{}, {"text": ["abc<think>"] * 2}, {"sampling_params": {"n": 2}}])
@pytest.mark.parametrize("budget", [1, 5, 20])
def test_generate_ends_reasoning_with_its_budget_as_chats_do(thinking, budget, how):
    params = {"max_new_tokens": 60, "seed": 1, **how.get("sampling_params", {})}
    body = {
        "text": "abc<think>",
        "max_thinking_tokens": budget,
        "return_logprob": True,
        "return_entropy": True,
        **how,
        "sampling_params": params,
    }
    answers = thinking.generate(**body)
    for answer in answers if how else [answers]:
        thought, mark, rest = answer["text"].partition(MARK)
        assert (len(thought), mark, len(rest)) == (budget, MARK, 60 - budget - len(MARK))
        assert answer["meta_info"]["completion_tokens"] == len(answer["meta_info"]["output_token_logprobs"]) == 60
        assert len(answer["meta_info"]["output_token_entropy"]) == 60
    found = choice(thinking, thinking_token_budget=budget)["message"]
    assert how or found["reasoning_content"] + MARK + found["content"] == answers["text"]
    events = parse_events(thinking.post(stream=True, **body).text)
    for index, answer in enumerate(answers if how else [answers]):
        assert [event for event in events if event.get("index", 0) == index][-1]["text"] == answer["text"]
    thinking.check_idle()


def test_an_answer_names_the_weights_that_drew_it_if_they_were_exchanged_after_its_reasoning(thinking, monkeypatch):
    note, num_prompt = Output.note_origin, len("abc<think>")

    def noted(output, version, hardware, num_new):
        note(output, "old" if len(output.request.token_ids) == num_prompt else "new", hardware, num_new)

    monkeypatch.setattr(Output, "note_origin", noted)
    body = {"text": "abc<think>", "max_thinking_tokens": 5, "sampling_params": {"max_new_tokens": 60, "seed": 1}}
    whole, *_, streamed = thinking.generate(**body), *parse_events(thinking.post(stream=True, **body).text)
    begin = 5 + len(MARK)
    ranges = [{"version": "old", "start": 0, "end": begin}, {"version": "new", "start": begin, "end": 60}]
    for meta in (whole["meta_info"], streamed["meta_info"]):
        assert (meta["weight_version"], meta.get("weight_version_ranges")) == ("new", ranges)


@pytest.mark.parametrize("more", [{}, {"max_thinking_tokens": 50}])
def test_a_constraint_waits_for_the_end_of_the_reasoning_that_generate_requires(inside, more):
    params = {"regex": "[xy]{4}", "max_new_tokens": 60}
    answer = inside.generate(text="say:hm</think>z", require_reasoning=True, sampling_params=params, **more)
    assert re.fullmatch("hm</think>[xy]{4}", answer["text"])
    assert re.fullmatch("[xy]{4}", inside.generate(text="say:hm</think>z", sampling_params=params)["text"])
    free = {"text": "say:hm</think>z", "sampling_params": {"max_new_tokens": 60}}
    assert inside.generate(**free, require_reasoning=True, **more)["text"] == "hm</think>z"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        (
            "sampling_params.grammar_after",
            {"require_reasoning": True, "sampling_params": {"regex": "a", "grammar_after": "b"}},
        ),
        ("max_thinking_tokens", {"max_thinking_tokens": 5, "session_params": {"id": "x"}}),
    ],
)
def test_reasoning_that_cannot_be_required_is_refused_by_name(inside, param, body):
    response = inside.post(text="a", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
