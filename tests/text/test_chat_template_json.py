"""Chat templates in JSON: the texts are those that FastChat's conversation.py, of which the styles are, writes."""

from __future__ import annotations

import json

import pytest
from sample_tokenizers import make_byte_level

from tureen.errors import StartupError
from tureen.text.chat_template import check_chat_template, load_chat_templates

PAGE = {
    "name": "my_model",
    "system": "<|im_start|>system",
    "user": "<|im_start|>user",
    "assistant": "<|im_start|>assistant",
    "sep_style": "CHATML",
    "sep": "<|im_end|>",
    "stop_str": ["<|im_end|>", "<|im_start|>", "User:"],
}
PLAIN = {"name": "n", "system": "S", "user": "U", "assistant": "A", "sep": "|", "sep2": "#", "stop_str": "U:"}
CHAT = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "on"},
]


def _templates(folder, **fields):
    file = folder / "template.json"
    file.write_text(json.dumps(fields), encoding="utf-8")
    check_chat_template(str(file))
    return load_chat_templates(str(file), make_byte_level(), {})


def _text(templates, messages, **how):
    return templates.controls.plain(templates.plain.render(messages, **how))


def test_the_example_of_the_page_is_chatml(tmp_path):
    templates = _templates(tmp_path, **PAGE)
    assert _text(templates, CHAT[:2]) == (
        "<|im_start|>system\nbe good<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert _text(templates, CHAT[1:2]) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_ends_an_answer_is_a_token_where_there_is_one_and_else_a_string(tmp_path):
    templates = _templates(tmp_path, **PAGE)
    tokenizer = make_byte_level()
    assert templates.end_ids == (tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|im_start|>"))
    assert templates.stops == ("User:",)


@pytest.mark.parametrize(
    ("style", "whole", "without_system"),
    [
        ("ADD_COLON_SINGLE", "S\nbe good|U: hi|A: ho|U: on|A:", "S\n|U: hi|A:"),
        ("ADD_COLON_TWO", "S\nbe good|U: hi|A: ho#U: on|A:", "S\n|U: hi|A:"),
        ("ADD_COLON_SPACE_SINGLE", "S\nbe good|U: hi|A: ho|U: on|A: ", "S\n|U: hi|A: "),
        ("NO_COLON_SINGLE", "S\nbe goodUhi|Aho|Uon|A", "S\nUhi|A"),
        ("NO_COLON_TWO", "S\nbe goodUhi|Aho#Uon|A", "S\nUhi|A"),
        ("ADD_NEW_LINE_SINGLE", "S\nbe good|U\nhi|A\nho|U\non|A\n", "S\n|U\nhi|A\n"),
        ("CHATML", "S\nbe good|\nU\nhi|\nA\nho|\nU\non|\nA\n", "S\n|\nU\nhi|\nA\n"),
        ("CHATGLM3", "S\nbe goodU\nhiA\nhoU\nonA", "U\nhiA"),
        ("ROBIN", "S\nbe good|U:\nhi|A:\nho|U:\non|A:\n", "S\n|U:\nhi|A:\n"),
        ("FALCON_CHAT", "S\nbe good|U: hi|A: ho|U: on|A:", "U: hi|A:"),
        ("DEEPSEEK_CHAT", "S\nbe goodU: hi|A: ho#U: on|A:", "S\nU: hi|A:"),
        ("MPT", "S\nbe good|Uhi|Aho|Uon|A", "S\n|Uhi|A"),
    ],
)
def test_each_style_writes_what_fastchat_writes(tmp_path, style, whole, without_system):
    templates = _templates(tmp_path, **PLAIN, sep_style=style)
    assert _text(templates, CHAT) == whole
    assert _text(templates, CHAT[1:2]) == without_system
    assert _text(templates, CHAT[1:3], continue_final_message=True).endswith("ho")


def test_a_system_message_of_the_file_is_for_chats_that_have_none(tmp_path):
    templates = _templates(tmp_path, **PLAIN, sep_style="MPT", system_message="be {{ kind }} 'é\U0001f642")
    assert _text(templates, CHAT[1:2]) == "S\nbe {{ kind }} 'é\U0001f642|Uhi|A"
    assert _text(templates, CHAT[:2]) == "S\nbe good|Uhi|A"


def test_what_clients_write_is_no_control_token(tmp_path):
    templates = _templates(tmp_path, **PAGE)
    rendering = templates.plain.render([{"role": "user", "content": "<|im_end|>"}])
    assert templates.controls.plain(rendering).count("<|im_end|>") == 3
    assert templates.controls.count_spelled(rendering) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (PAGE | {"sep_style": "LLAMA2"}, "sep_style 'LLAMA2' is not supported: use ADD_COLON_SINGLE, "),
        (PAGE | {"sepp": "x"}, "sepp"),
        ({name: PAGE[name] for name in PAGE if name != "user"}, "user"),
        (PAGE | {"stop_str": 5}, "stop_str"),
    ],
)
def test_a_wrong_file_ends_the_start_with_its_field(tmp_path, fields, words):
    with pytest.raises(StartupError, match=r"^--chat-template .*template\.json: ") as caught:
        _templates(tmp_path, **fields)
    assert words in str(caught.value)
