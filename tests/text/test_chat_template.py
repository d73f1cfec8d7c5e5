"""Chat templates, against transformers' rendering of the same ones; what a template cannot do; what may be given."""

from __future__ import annotations

import json
import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_chats import chats, texts
from sample_tokenizers import make_byte_level
from template_samples import ALL, CALL_TEXTS, GEMMA, LLAMA3, LLAVA, MISTRAL, NAMED, OF_ROLES, QWEN
from transformers.utils.chat_template_utils import render_jinja_template

from tureen.errors import InvalidRequest, StartupError
from tureen.text.chat_template import BUILT_IN, ChatTemplate, check_chat_template, load_chat_templates
from tureen.text.control_tokens import ControlTokens
from tureen.text.messages import Tool
from tureen.text.template_jobs import do_job
from tureen.text.tokenizer import Tokenizer, from_folder
from tureen.weights.source import load_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool(name="weather", description="The weather of <a> & 'b' </s>", parameters=SCHEMA)
CONTROLS = ControlTokens(make_byte_level(), {"<image>": -2})
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
HISTORY = [
    {"role": "user", "content": "warm?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "21 C", "tool_call_id": "abcdef123"},
]


def _make_template(source, pictures=None):
    return ChatTemplate(source, CONTROLS, tokens=NAMED, placeholders=pictures or {})


TEMPLATES = {name: _make_template(source) for name, source in ALL.items()}


def _text(template, messages, tools=(), **how):
    return CONTROLS.plain(template.render(messages, tools, **how))


def _oracle(source, messages, tools=(), add_generation_prompt=True, continue_final_message=False, **variables):
    as_dicts = [tool.as_openai() for tool in tools] or None
    [text], _ = render_jinja_template(
        [messages], as_dicts, chat_template=source, add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message, **NAMED, **variables,
    )  # fmt: skip
    return text


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_chat_has_the_text_that_transformers_gives_it(name, data):
    has_tools = name in ("llama3", "qwen", "granite")
    has_system = name not in ("mistral", "gemma")
    messages = data.draw(chats(system=has_system, tools=has_tools, reasoning=name == "qwen"))
    tools = [WEATHER] if has_tools and data.draw(st.booleans()) else []
    assert _text(TEMPLATES[name], messages, tools) == _oracle(ALL[name], messages, tools)


@settings(max_examples=40, deadline=None)
@given(chats(), texts.filter(str.strip), st.sampled_from(["chatml", "llama3", "of-roles"]))
def test_a_last_message_is_continued_as_transformers_does(messages, begun, name):
    messages = [*messages, {"role": "assistant", "content": begun}]
    expected = _oracle(ALL[name], messages, add_generation_prompt=False, continue_final_message=True)
    assert _text(TEMPLATES[name], messages, continue_final_message=True) == expected


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_a_template_that_trims_what_is_continued_trims_its_end_too(name):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so  \n"}]
    expected = _oracle(ALL[name], messages, add_generation_prompt=False, continue_final_message=True)
    assert _text(TEMPLATES[name], messages, continue_final_message=True) == expected
    assert expected.endswith("so  \n" if name == "chatml" else "so")


@settings(max_examples=20, deadline=None)
@given(chats(), texts, st.booleans())
def test_variables_of_a_request_act_as_with_transformers(messages, text, flag):
    assert _text(TEMPLATES["llama3"], messages, template_kwargs={"date_string": text}) == _oracle(
        LLAMA3, messages, date_string=text
    )
    assert _text(TEMPLATES["qwen"], messages, template_kwargs={"enable_thinking": flag}) == _oracle(
        QWEN, messages, enable_thinking=flag
    )


def test_only_variables_that_the_template_reads_are_taken():
    assert TEMPLATES["qwen"].variables == {"enable_thinking"}
    assert TEMPLATES["llama3"].variables == {"date_string"}
    assert TEMPLATES["granite"].variables == {"controls"}
    for name in (
        "enable_think",
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "content",
        "raise_exception",
    ):
        with pytest.raises(InvalidRequest, match=f"no variable '{name}'; it has: enable_thinking"):
            TEMPLATES["qwen"].render([{"role": "user", "content": "x"}], template_kwargs={name: 1})


def test_a_template_in_a_request_is_refused():
    with pytest.raises(InvalidRequest, match="--chat-template") as error:
        TEMPLATES["qwen"].render([{"role": "user", "content": "x"}], template_kwargs={"chat_template": "{{ 1 }}"})
    assert error.value.code == "chat_template_not_allowed"


def test_what_a_template_complains_about_is_told_with_the_field():
    with pytest.raises(InvalidRequest, match=r"input: .* Roles must take turns: user, assistant") as error:
        TEMPLATES["mistral"].render([{"role": "assistant", "content": "x"}], field="input")
    assert error.value.field == "input"
    long = _make_template("{{ raise_exception('bad\n\x07' + eos_token + messages[0].content * 9) }}")
    with pytest.raises(InvalidRequest) as error:
        long.render([{"role": "user", "content": "x" * 100}])
    assert len(error.value.message) < 400
    assert "bad  </s>xx" in error.value.message
    assert error.value.message.isprintable()


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{{ nothing.at.all }}", "{{ 1|length }}"]
)
def test_a_template_that_fails_is_an_error_of_the_request(source):
    with pytest.raises(InvalidRequest, match="messages: the model's chat template rejects these messages: "):
        _make_template(source).render([{"role": "user", "content": "x"}])


def test_arguments_that_are_too_deeply_nested_are_an_error_of_the_request():
    deep: list = []
    for _ in range(200_000):  # more than any interpreter reads
        deep = [deep]
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"a": deep}}}
    for source in (ALL["chatml"], QWEN, CALL_TEXTS):
        with pytest.raises(InvalidRequest, match=r"messages: .*nested"):
            _make_template(source).render([HISTORY[0], {"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ({"role": "user", "content": "x"}, "role user"),
        ({"role": "assistant", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
    ],
)
def test_only_words_of_the_assistant_are_continued(last, said):
    for source in (ALL["chatml"], QWEN):
        with pytest.raises(InvalidRequest, match=f"input: .*{said}") as error:
            _make_template(source).render([HISTORY[0], last], field="input", continue_final_message=True)
        assert error.value.field == "input"


def test_a_chat_without_messages_is_refused():
    with pytest.raises(InvalidRequest, match="messages is empty"):
        TEMPLATES["chatml"].render([])


# what a template cannot do itself


def test_tools_are_text_for_a_template_that_knows_none():
    messages = [{"role": "system", "content": "Be brief."}, *HISTORY, {"role": "user", "content": "and in Bonn?"}]
    text = _text(TEMPLATES["chatml"], messages, [WEATHER])
    system, *turns = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    listed = system.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(listed) == WEATHER.as_openai()
    assert "<tool_call>" in system
    call = turns[1].partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
    assert json.loads(call) == {"name": "weather", "arguments": {"city": "Ulm"}}
    assert turns[2] == "user\n<tool_response>\n21 C\n</tool_response><|im_end|>\n"
    assert turns[3:] == ["user\nand in Bonn?<|im_end|>\n", "assistant\n"]


def test_results_in_a_row_are_one_turn():
    text = _text(TEMPLATES["chatml"], [*HISTORY, HISTORY[2]])
    assert text.count("<|im_start|>user") == 2
    assert text.count("<tool_response>\n21 C\n</tool_response>") == 2


def test_where_no_system_message_can_be_tools_go_to_the_first_user_message():
    for source in (GEMMA, MISTRAL):
        text = _text(_make_template(source), [{"role": "user", "content": "warm?"}], [WEATHER])
        assert text.index("<tools>") < text.index("warm?")
        assert "system" not in text


def test_a_template_that_knows_tools_writes_them_itself():
    text = _text(TEMPLATES["qwen"], HISTORY, [WEATHER])
    assert text == _oracle(QWEN, HISTORY, [WEATHER])
    assert "Environment: tools" in _text(TEMPLATES["llama3"], HISTORY, [WEATHER])


def test_arguments_are_text_where_the_template_wants_that():
    text = _text(_make_template(CALL_TEXTS), HISTORY)
    assert '\n```json\n{"city": "Ulm"}\n```' in text
    assert '"arguments": {"city": "Ulm"}' in _text(TEMPLATES["qwen"], HISTORY)


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"loops"}))
@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_a_continued_message_without_text_begins_where_the_template_begins_it(name, blank):
    """As at the beginning of an answer: what the template writes before a text, and then what the model writes."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blank}]
    begun = _text(TEMPLATES[name], chat, continue_final_message=True)
    whole = _text(TEMPLATES[name], [chat[0], {"role": "assistant", "content": "written"}], continue_final_message=True)
    assert whole in (f"{begun}written", f"{begun.removesuffix(blank)}written")


IN_TAGS = """{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>
{% endfor %}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("template", [*TEMPLATES.values(), _make_template(CALL_TEXTS), _make_template(IN_TAGS)])
@pytest.mark.parametrize("arguments", ["[]", '{"city": "Ul'])
def test_arguments_that_are_no_object_reach_the_model_as_text(template, arguments):
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    text = _text(
        template, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    known = "weather" in text  # some templates write no calls
    assert arguments in text or json.dumps(arguments)[1:-1] in text or not known


def test_an_object_takes_arguments_that_are_no_object_where_the_template_reads_names_and_values():
    call = {**CALL, "function": {"name": "weather", "arguments": "[]"}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "<parameter=input>[]</parameter>" in _text(
        _make_template("{# {{ tools }} #}{{ tools or '' }}" + IN_TAGS), chat
    )


SHORT_IDS = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}[TOOL_CALLS]
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- call.id }} {{ call.function | tojson }}{{ eos_token }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('ids have length 9') }}{% endif %}
{{- '[TOOL_RESULTS]' + message.content + ' ' + message.tool_call_id + '[/TOOL_RESULTS]' }}
{%- else %}{{ message.content + eos_token }}{% endif %}
{%- endfor %}"""
"""Demands ids of calls as Mistral's do."""


def test_ids_of_calls_are_short_where_the_template_demands_it():
    def chat(*names):
        calls = [{**CALL, "id": name} for name in names]
        results = [{"role": "tool", "content": "21 C", "tool_call_id": name} for name in names]
        return [HISTORY[0], {"role": "assistant", "content": "", "tool_calls": calls}, *results]

    template = _make_template(SHORT_IDS)
    assert _text(template, HISTORY, [WEATHER]) == _oracle(SHORT_IDS, HISTORY, [WEATHER])
    names = ["call_0123456789abcdef01234567", "toolu_\u00fc", "abc-ef_23", "abcdef123"]
    text = _text(template, chat(*names), [WEATHER])
    called = re.findall(r"(\w{9}) {", text)
    assert called == re.findall(r"21 C ([A-Za-z0-9]{9})\[", text)
    assert len(set(called)) == 4
    assert called[3] == names[3]
    assert text == _text(template, chat(*names), [WEATHER])
    assert names[0] in _text(_make_template(SHORT_IDS.replace("!= 9", "== 0")), chat(names[0]), [WEATHER])


def test_a_call_needs_no_text_beside_it():
    for content in ({}, {"content": None}, {"content": ""}):
        message = {"role": "assistant", "tool_calls": [CALL], **content}
        assert _text(TEMPLATES["qwen"], [HISTORY[0], message, HISTORY[2]]) == _oracle(QWEN, HISTORY)


def test_parts_are_lines_where_the_template_wants_a_string():
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = _text(TEMPLATES["chatml"], [{"role": "user", "content": content}])
    assert text == _oracle(ALL["chatml"], [{"role": "user", "content": "one\ntwo"}])


def test_a_string_is_a_part_where_the_template_wants_parts():
    template = _make_template(LLAVA, {"image": "<image>"})
    text = _text(template, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}])
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": []}]
    assert text == _oracle(LLAVA, parts) == "USER: hi ASSISTANT: ASSISTANT:"


def test_pictures_stand_where_the_template_or_else_the_parts_have_them():
    content = [{"type": "text", "text": "see"}, {"type": "image"}, {"type": "text", "text": "this <image>"}]
    messages = [{"role": "user", "content": content}]
    own = _make_template(LLAVA, {"image": "<image>"}).render(messages)
    assert CONTROLS.plain(own) == _oracle(LLAVA, messages) == "USER: <image>\nsee this <image> ASSISTANT:"
    joined = _make_template(ALL["chatml"], {"image": "<image>"}).render(messages)
    assert "user\nsee\n<image>\nthis <image>" in CONTROLS.plain(joined)
    for rendering in (own, joined):
        assert CONTROLS.encode(rendering).token_ids.count(-2) == 1
    with pytest.raises(InvalidRequest, match="this model takes no images"):
        TEMPLATES["chatml"].render(messages)


def test_tokens_made_of_roles_are_the_template_s():
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "user"}]
    source = OF_ROLES + "{{ messages[0].role + 's' }} {{ messages[1].role }}"
    ids = CONTROLS.encode(_make_template(source).render(messages)).token_ids
    oracle = make_byte_level().backend.encode(_oracle(source, messages), add_special_tokens=False)
    assert ids == oracle.ids


def test_a_template_that_makes_tokens_of_other_pieces_is_told_of(caplog):
    with caplog.at_level(logging.WARNING):
        _make_template("{{ '<|im' }}{{ '_end|>' }}{{ messages[0].content }}").probe()
    assert "joins pieces to control tokens" in caplog.text


def test_the_first_test_chat_that_takes_a_template_to_its_limit_is_the_last():
    jobs = []

    def do(job):
        jobs.append(job)
        return do_job(job)

    template = ChatTemplate("{{ 'x' * 1000000000 }}", CONTROLS, tokens=NAMED, placeholders={}, do=do)
    with pytest.raises(InvalidRequest, match="the chat template cannot render these: it makes") as refused:
        template.render([{"role": "user", "content": "x"}])
    assert (refused.value.code, len(jobs)) == ("chat_template_limit", 1)


# which template it is


@pytest.mark.parametrize("given", [None, "vicuna_v1.1", "chatml-llava", "chatml", "llama-2"])
def test_the_documented_names_are_known(given):
    check_chat_template(given)


@pytest.mark.parametrize("given", ["vicuna", "Vicuna_v1.1", "", "chatml-llava.txt", "x" * 500])
def test_other_names_are_refused_with_those_that_are_known(given):
    with pytest.raises(
        StartupError,
        match=r"--chat-template .*use chatml, chatml-llava, vicuna_v1.1, llama-2, a .jinja or a .json file",
    ) as error:
        check_chat_template(given)
    assert len(error.value.message) < 200


def test_a_file_must_be_there_and_compile(tmp_path):
    file = tmp_path / "own.jinja"
    with pytest.raises(StartupError, match="no such file"):
        check_chat_template(str(file))
    file.write_text("{{ messages }}")
    check_chat_template(str(file))
    for broken in ("{% for x in %}", "{{", "{% endfor %}", "{% nothing %}", "{{ x | no_such_filter }}"):
        file.write_text(f"\n{broken}")
        with pytest.raises(StartupError, match=r"own.jinja: .*\(line 2\)"):
            check_chat_template(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"own.jinja: is not UTF-8"):
        check_chat_template(str(file))


def _loaded(given=None, *, chat_template=None, tool_template=None, special=True):
    tokenizer = make_byte_level()
    tokenizer.chat_template, tokenizer.tool_template = chat_template, tool_template
    return load_chat_templates(given, tokenizer if special else Tokenizer(_without_added(tokenizer)), {})


def _without_added(tokenizer):
    return type(tokenizer.backend)(tokenizer.backend.model)


def test_the_operator_s_template_goes_before_the_model_s(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("from the file\n")
    assert _loaded(str(file), chat_template="own").plain.source == "from the file\n"
    assert _loaded("vicuna_v1.1", chat_template="own").plain.source == BUILT_IN["vicuna_v1.1"]
    assert _loaded(chat_template="own").plain.source == "own"
    assert _loaded().plain.source == BUILT_IN["chatml"]


def test_a_template_for_tools_is_used_for_tools():
    templates = _loaded(chat_template="plain", tool_template="{{ tools | length }} tools")
    assert templates.of([]).source == "plain"
    assert templates.of([WEATHER]).render([{"role": "user", "content": "x"}], [WEATHER]) == "1 tools"
    assert _loaded(chat_template="plain").of([WEATHER]).source == "plain"


def test_a_model_without_a_template_has_a_reason_instead():
    assert "--chat-template" in _loaded(special=False)


def test_a_broken_template_of_the_model_is_a_warning_and_a_reason(caplog):
    reason = _loaded(chat_template="{% for %}")
    assert "does not compile" in reason
    assert "line 1" in reason
    assert "does not compile" in caplog.text


def test_a_named_template_begins_as_the_tokenizer_does():
    tokenizer = make_byte_level()
    messages = [{"role": "user", "content": "hi"}]
    assert not load_chat_templates("vicuna_v1.1", tokenizer, {}).plain.source.startswith("{{ bos_token")
    from tureen.text.gguf_vocab import add_around

    add_around(tokenizer.backend, tokenizer.bos_token_id, None)
    templates = load_chat_templates("chatml", tokenizer, {})
    text = templates.controls.plain(templates.plain.render(messages))
    assert text == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_named_templates_write_the_documented_forms():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = _text(_make_template(BUILT_IN["vicuna_v1.1"]), messages)
    assert text.endswith("questions. USER: a ASSISTANT: b</s>USER: c ASSISTANT:")
    llama = _make_template(BUILT_IN["llama-2"])
    assert _text(llama, messages) == "[INST] a [/INST] b </s><s>[INST] c [/INST]"
    told = [{"role": "system", "content": "Be brief."}, *messages]
    assert _text(llama, told).startswith("[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\na [/INST] b </s><s>[INST] c")
    chatml = _oracle(ALL["chatml"], messages)
    assert _text(_make_template(BUILT_IN["chatml"]), messages) == chatml
    with_system = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
    assert _text(_make_template(BUILT_IN["chatml-llava"]), messages) == _oracle(ALL["chatml"], with_system)
    assert load_chat_templates("chatml-llava", make_byte_level(), {}).end_ids == (
        make_byte_level().token_id("<|im_end|>"),
    )


def test_the_default_model_s_own_template_renders_as_transformers_does(default_model_source):
    tokenizer = load_tokenizer(default_model_source)
    templates = load_chat_templates(None, tokenizer, {})
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    text = templates.controls.plain(templates.plain.render(messages))
    [expected], _ = render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, add_generation_prompt=True, **tokenizer.named_tokens
    )
    assert text == expected
    assert tokenizer.named_tokens["eos_token"] == "<|im_end|>"


def test_templates_and_names_of_tokens_come_from_the_model_s_folder(tmp_path):
    make_byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    settings = {"chat_template": several, "eos_token": {"content": "</s>"}, "add_bos_token": False, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|end|>"}))
    tokenizer = from_folder(tmp_path)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("d", "t")
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert from_folder(tmp_path).chat_template == "of the processor"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("from a file")
    assert from_folder(tmp_path).tool_template == "from a file"
