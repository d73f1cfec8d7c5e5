"""`/tokenize` and `/detokenize` over a tokenizer whose tokens are bytes; the clients' names of the fields."""

from __future__ import annotations

import pytest
from app_under_test import App
from byte_tokenizer import BOS, EOS, VOCAB_SIZE
from fake_engine import CONTEXT_LEN

TEXT = "ein Wörtchen"


def _answer(app, path, **body):
    response = app.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_becomes_its_tokens_and_they_become_the_text(app, prefix):
    answer = _answer(app, f"{prefix}/tokenize", prompt=TEXT, model="fake-model")
    ids = list(TEXT.encode())
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT_LEN}
    back = _answer(app, f"{prefix}/detokenize", tokens=ids, model="fake-model")
    assert back == {"text": TEXT, "prompt": TEXT, "content": TEXT}


def test_lists_in_are_lists_out(app):
    answer = _answer(app, "/tokenize", prompt=["a", "", "bc"])
    assert answer["tokens"] == [[97], [], [98, 99]]
    assert answer["count"] == [1, 0, 2]
    assert _answer(app, "/detokenize", tokens=answer["tokens"])["text"] == ["a", "", "bc"]
    assert _answer(app, "/tokenize", prompt=["a"])["tokens"] == [[97]]
    assert _answer(app, "/detokenize", tokens=[[97]])["text"] == ["a"]
    assert _answer(app, "/detokenize", tokens=[])["text"] == ""


def test_special_tokens_are_left_out_of_a_text_unless_they_are_asked_for(app):
    ids = [BOS, *b"hi", EOS]
    assert _answer(app, "/detokenize", tokens=ids)["text"] == "hi"
    assert _answer(app, "/detokenize", tokens=ids, skip_special_tokens=False)["text"] == "<bos>hi<eos>"


def test_a_text_longer_than_the_context_is_counted(app):
    assert _answer(app, "/tokenize", prompt="x" * (3 * CONTEXT_LEN))["count"] == 3 * CONTEXT_LEN


@pytest.mark.parametrize(
    ("path", "body", "field", "said"),
    [
        ("/tokenize", {}, "prompt", "neither"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", "both"),
        ("/tokenize", {"prompt": [1]}, "prompt[0]", "str"),
        ("/tokenize", {"prompt": []}, "prompt", "1 to 2048"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "needs messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "needs messages"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "needs messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
            "template",
        ),
        ("/tokenize", {"zebra": "a"}, "prompt", "neither"),
        ("/tokenize", {"text": "a"}, "text", "SGLang /generate"),
        ("/tokenize", {"prompt": "a", "tool_choice": "none"}, "tool_choice", "needs messages"),
        ("/tokenize", {"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort", "needs messages"),
        ("/tokenize", {"prompt": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "truncate them"),
        ("/tokenize", {"input_ids": [1]}, "input_ids", "already tokens"),
        ("/tokenize", {"promt": "a"}, "promt", "did you mean 'prompt'"),
        ("/detokenize", {}, "tokens", "missing"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens", "got -1"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens", f"[0, {VOCAB_SIZE})"),
        ("/detokenize", {"tokens": [[1], [2**60]]}, "tokens[1]", "got 1152921504606846976"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens", "mixes"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens", "mixes"),
        ("/detokenize", {"tokens": "abc"}, "tokens", "abc"),
        ("/detokenize", {"tokens": [[1]] * 2049}, "tokens", "2048"),
    ],
)
def test_what_is_wrong_is_named(app, path, body, field, said):
    error = app.error(path=path, **body)
    assert error["param"] == field
    assert said in error["message"]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]


@pytest.fixture(scope="module")
def chatting():
    marks = ("<|im_start|>", "<|im_end|>")
    with App(chat_template="chatml", special=marks, facts={"vocab_size": VOCAB_SIZE + len(marks)}) as running:
        yield running


def _as_text(chatting, **body):
    ids = _answer(chatting, "/tokenize", **body)["tokens"]
    return _answer(chatting, "/detokenize", tokens=ids, skip_special_tokens=False)["text"]


def test_a_chat_becomes_the_tokens_of_its_template(chatting):
    """The template is OpenAI's ChatML; a client's own mark in a message is text, not the mark's token."""
    whole = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n"
    assert _as_text(chatting, messages=CHAT) == whole + "<|im_start|>assistant\n"
    assert _as_text(chatting, messages=CHAT, add_generation_prompt=False) == whole
    gone_on = [*CHAT, {"role": "assistant", "content": "Well"}]
    assert _as_text(chatting, messages=gone_on, continue_final_message=True) == whole + "<|im_start|>assistant\nWell"
    ids = _answer(chatting, "/tokenize", messages=CHAT, add_generation_prompt=False)["tokens"]
    assert sum(one >= VOCAB_SIZE for one in ids) == 4


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}]}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs.chat_template"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_wrong_with_a_chat_is_named(chatting, body, field):
    assert chatting.error(path="/tokenize", **({"messages": CHAT} | body))["param"] == field


def test_a_model_without_a_template_says_so(app):
    error = app.error(path="/tokenize", messages=CHAT)
    assert error["code"] == "no_chat_template"


AS_TOLD = (
    "{# <think> #}{{ '[tools]' if tools }}{{ '[quiet]' if enable_thinking is false }}{{ reasoning_effort }}"
    "{{ messages[-1]['content'] }}{{ '>' if add_generation_prompt }}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def variable(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "variables.jinja"
    file.write_text(AS_TOLD)
    with App(chat_template=str(file)) as running:
        yield running


CHATS = [
    {},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "high"},
    {"reasoning": {"effort": "low"}},
    {"reasoning_effort": "low", "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
]


@pytest.mark.parametrize("fields", CHATS)
def test_a_chat_has_as_many_tokens_as_its_answer_says(variable, fields):
    """The whole body of a chat can be sent; what does not change its prompt is told."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 99,
        "temperature": 0.5,
        "stop": "x",
        **fields,
    }
    chat = variable.post("/v1/chat/completions", **body, return_token_ids=True)
    assert chat.status_code == 200, chat.text
    told = variable.post("/tokenize", **body)
    assert told.status_code == 200, told.text
    assert told.json()["tokens"] == chat.json()["prompt_token_ids"]
    assert told.json()["count"] == chat.json()["usage"]["prompt_tokens"]
    ignored = set(told.headers["x-tureen-ignored"].split(", "))
    assert ignored == {"max_tokens", "temperature", "stop"} | (fields.keys() & {"parallel_tool_calls"})


def test_a_variable_that_the_template_does_not_have_is_told(variable):
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"never": 1}}
    answer = variable.post("/tokenize", **body)
    assert bytes(answer.json()["tokens"]) == b"Hi>"
    assert answer.headers["x-tureen-ignored"] == "chat_template_kwargs.never"
    slip = variable.post("/tokenize", **body | {"chat_template_kwargs": {"enable_thinkin": False}})
    assert slip.status_code == 400
    assert "enable_thinking" in slip.json()["error"]["message"]


def test_texts_of_tokens_come_when_they_are_asked_for(app):
    assert _answer(app, "/tokenize", prompt="hi", return_token_strs=True)["token_strs"] == ["h", "i"]
    assert _answer(app, "/tokenize", prompt=["h", "i"], return_token_strs=True)["token_strs"] == [["h"], ["i"]]
