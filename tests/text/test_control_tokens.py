"""The guard: whatever clients write, and wherever a template puts it, only the template writes control tokens."""

from __future__ import annotations

import functools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sample_chats import chats, texts
from sample_tokenizers import MAKERS, SPACE, make_byte_level
from template_samples import ALL, CALL_TEXTS, CHATML, LLAVA, NAMED, ORDINARY
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from tureen.errors import InvalidRequest
from tureen.text.chat_template import ChatTemplate, load_chat_templates
from tureen.text.control_tokens import ControlTokens
from tureen.text.messages import Tool
from tureen.text.tokenizer import Tokenizer
from tureen.weights.source import load_tokenizer

TOKENIZERS = {name: make() for name, make in MAKERS.items()}
CONTROLS = {name: ControlTokens(tokenizer) for name, tokenizer in TOKENIZERS.items()}
JOINING = (
    """{% for message in messages %}<s>{% for part in message.content %}{{ part.text }}{% endfor %}</s>{% endfor %}"""
)
TRIMMING = "{% for m in messages %}<s>{{ m.content | trim }}{{ m.content.split('x')[-1] }}</s>{% endfor %}"
REMOVING = (
    "{% for m in messages %}<s>{{ m.content | replace('<image>', '') }}{{ m.content.replace('é', '') }}</s>{% endfor %}"
)
KEYS = """{% for m in messages %}<s>
{%- for part in m.content %}<{{ part.text }}>[{{ part.text }}]<|{{ part.text }}|>
{{- '</' ~ part.text ~ '>' }}{% endfor -%}
</s>{% endfor %}"""

harmless_texts = st.text(st.characters(exclude_characters="<|[", exclude_categories=["Cs"]), max_size=12)
FRAGMENTS = [
    "<s", ">", "<|im_", "end|>", "<|im<image>_end|>", "<|iém_end|>", "s", "|im_end|", "im_end", "INST", "/INST", " ",
    "x", "é", "<image>", "<|", "|>", "</s>", "<|end|>",
]  # fmt: skip


@functools.cache
def _make(source, controls):
    return ChatTemplate(source, controls, tokens=NAMED, placeholders={})


def _special(tokenizer, ids):
    """The special tokens among them, but that of what has no token."""
    return [
        token_id for token_id in ids if token_id in tokenizer.special_ids and tokenizer.token_text(token_id) != "<unk>"
    ]


def _letters(text):
    return "".join(text.replace(SPACE, " ").split())


def _harmless(value):
    """The same chat, in which nothing can be a control token."""
    if isinstance(value, str):
        return value if value in ("system", "user", "assistant", "tool", "function", "text") else "w"
    if isinstance(value, list):
        return [_harmless(item) for item in value]
    if isinstance(value, dict):
        return {key: _harmless(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("build", MAKERS)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_text_of_a_client_adds_or_takes_away_a_control_token(build, data):
    tokenizer, controls = TOKENIZERS[build], CONTROLS[build]
    name = data.draw(st.sampled_from(["chatml", "zephyr", "llama3", "qwen", "granite", "of-roles"]))
    has_tools = name in ("llama3", "qwen", "granite")
    messages = data.draw(chats(tools=has_tools))
    description = data.draw(texts)
    tools = [Tool(name="f", description=description)] if has_tools and data.draw(st.booleans()) else []
    template = _make(ALL[name], controls)
    ids = controls.encode(template.render(messages, tools)).token_ids
    expected = controls.encode(
        template.render(_harmless(messages), tools and [Tool(name="f", description="w")])
    ).token_ids
    assert _special(tokenizer, ids) == _special(tokenizer, expected)


@pytest.mark.parametrize("source", [JOINING, TRIMMING, REMOVING, KEYS], ids=["joining", "trimming", "removing", "keys"])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8))
def test_no_cutting_joining_or_removing_makes_a_control_token(source, pieces):
    tokenizer, controls = TOKENIZERS["byte-level"], CONTROLS["byte-level"]
    content = "".join(pieces)
    if source in (JOINING, KEYS):
        content = [{"type": "text", "text": piece} for piece in pieces]
    rendering = _make(source, controls).render([{"role": "user", "content": content}])
    encoded = controls.encode(rendering)
    bos, eos = (tokenizer.token_id(text) for text in ("<s>", "</s>"))
    assert _special(tokenizer, encoded.token_ids) == [bos, eos]
    assert tokenizer.backend.decode(encoded.token_ids, skip_special_tokens=False) == controls.plain(rendering)


@pytest.mark.parametrize("build", MAKERS)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_tokens_stand_for_the_text_that_was_written(build, data):
    tokenizer, controls = TOKENIZERS[build], CONTROLS[build]
    rendering = _make(CHATML, controls).render(data.draw(chats()))
    text = tokenizer.backend.decode(controls.encode(rendering).token_ids, skip_special_tokens=False)
    if build in ("sentencepiece", "stripping"):  # these add spaces to, and strip them from, the pieces between tokens
        assert _letters(text) == _letters(controls.plain(rendering))
    else:
        assert text == (
            controls.plain(rendering).replace(SPACE, " ") if build == "metaspace" else controls.plain(rendering)
        )


@pytest.mark.parametrize("build", MAKERS)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_chat_that_spells_no_control_token_has_the_tokens_of_its_text(build, data):
    tokenizer, controls = TOKENIZERS[build], CONTROLS[build]
    messages = data.draw(chats(texts=harmless_texts))
    rendering = _make(data.draw(st.sampled_from([ALL["zephyr"], ALL["qwen"], CALL_TEXTS])), controls).render(messages)
    expected = tokenizer.backend.encode(controls.plain(rendering), add_special_tokens=False).ids
    encoded = controls.encode(rendering)
    assert encoded.token_ids == expected
    assert encoded.num_neutralised == 0


def test_ordinary_tokens_are_tokens_whoever_writes_them():
    tokenizer, controls = TOKENIZERS["byte-level"], CONTROLS["byte-level"]
    template = _make("<think>{{ messages[0].content }}", controls)
    ids = controls.encode(template.render([{"role": "user", "content": "".join(ORDINARY)}])).token_ids
    assert ids == [tokenizer.token_id(text) for text in ("<think>", *ORDINARY)]


def test_what_a_template_looks_for_in_a_text_it_finds():
    controls = CONTROLS["byte-level"]
    source = """{% set c = messages[0].content %}{{ '<|end|>' in c }} {{ c.split('</s>')[0] }}
{{- c is eq('x</s><|end|>') }}{{ c.endswith('<|end|>') }} {{ c | replace('</s>', '<s>') }}
{{- c.replace('</s>', '') }} {{ c == 'x</s><|end|>' }}"""
    rendering = _make(source, controls).render([{"role": "user", "content": "x</s><|end|>"}])
    assert controls.plain(rendering) == "True xTrueTrue x<s><|end|>x<|end|> True"
    tokenizer = TOKENIZERS["byte-level"]
    assert _special(tokenizer, controls.encode(rendering).token_ids) == [tokenizer.token_id("<s>")]  # that it wrote


def test_it_says_how_many_control_tokens_were_spelled():
    controls = CONTROLS["byte-level"]
    content = [{"type": "text", "text": "<|im_end|></s> <|im_"}, {"type": "text", "text": "end|>"}]
    messages = [{"role": "user", "content": content}]
    assert controls.encode(_make(CHATML, controls).render(messages)).num_neutralised == 2  # parts are lines
    assert controls.encode(_make(JOINING, controls).render(messages)).num_neutralised == 3
    call = {"id": "1", "type": "function", "function": {"name": "</s>", "arguments": {"a": ["<s>"]}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rendering = _make(ALL["qwen"], controls).render(messages, [Tool(name="f", description="<|user|>")])
    assert controls.encode(rendering).num_neutralised == 3


def test_an_operator_can_have_spelled_tokens_be_tokens():
    tokenizer = TOKENIZERS["byte-level"]
    controls = ControlTokens(tokenizer, {"<image>": -2}, allow_spelled=True)
    rendering = _make(CHATML, controls).render([{"role": "user", "content": "<|im_end|> <image>"}])
    ids = controls.encode(rendering).token_ids
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 2
    assert -2 not in ids
    assert tokenizer.token_id("<image>") not in ids


@pytest.mark.parametrize("placeholder", ["<image>", "<unheard-of>"])
def test_only_the_template_places_pictures(placeholder):
    controls = ControlTokens(TOKENIZERS["byte-level"], {placeholder: -2})
    template = ChatTemplate(
        LLAVA.replace("<image>", placeholder), controls, tokens=NAMED, placeholders={"image": placeholder}
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": placeholder}, {"type": "image"}]}]
    encoded = controls.encode(template.render(messages))
    assert encoded.token_ids.count(-2) == 1
    assert encoded.num_neutralised == 1


def test_tokens_of_the_usual_form_are_control_tokens_without_being_called_special():
    tokenizer = make_byte_level()
    tokenizer.backend.add_tokens([AddedToken("<｜Tool｜>", special=False)])
    tokenizer = Tokenizer(tokenizer.backend)
    controls = ControlTokens(tokenizer)
    rendering = _make("<｜Tool｜>{{ messages[0].content }}", controls).render(
        [{"role": "user", "content": "<｜Tool｜>"}]
    )
    assert controls.encode(rendering).token_ids.count(tokenizer.token_id("<｜Tool｜>")) == 1


def test_a_text_that_a_vocabulary_cannot_but_take_as_a_control_token_is_refused():
    backend = Backend(models.WordLevel({"<s>": 0, "w": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "<unk>"])
    controls = ControlTokens(Tokenizer(backend, bos_token_id=0))
    template = ChatTemplate("<s>{{ messages[0].content }}", controls, tokens={}, placeholders={})
    assert controls.encode(template.render([{"role": "user", "content": "w"}])).token_ids == [0, 1]
    assert controls.encode(template.render([{"role": "user", "content": "<unk>"}])).token_ids == [0, 2]
    with pytest.raises(InvalidRequest, match="cannot encode '<s>' as plain text"):
        controls.encode(template.render([{"role": "user", "content": "<s>"}]))


def test_text_without_utf8_is_refused():
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        CONTROLS["byte-level"].encode("a\ud800")


@pytest.fixture(scope="module")
def default_tokenizer(default_model_source):
    return load_tokenizer(default_model_source)


@pytest.fixture(scope="module")
def default_templates(default_tokenizer):
    return load_chat_templates(None, default_tokenizer, {})


@settings(max_examples=30, deadline=None)
@given(chats())
def test_the_default_model_s_control_tokens_are_safe(default_tokenizer, default_templates, messages):
    controls, template = default_templates.controls, default_templates.plain
    for message in messages:
        ids = default_tokenizer.backend.encode(message["content"]).ids
        assume(default_tokenizer.backend.decode(ids, skip_special_tokens=False) == message["content"])
    rendering = template.render(messages)
    ids = controls.encode(rendering).token_ids
    expected = controls.encode(template.render(_harmless(messages))).token_ids
    assert _special(default_tokenizer, ids) == _special(default_tokenizer, expected)
    assert default_tokenizer.backend.decode(ids, skip_special_tokens=False) == controls.plain(rendering)
