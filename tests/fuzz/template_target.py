"""A chat template of a model that somebody made, and a client's text in it."""

from __future__ import annotations

import contextlib
from unittest import mock

from byte_tokenizer import make_byte_tokenizer

from tureen.text import template_sandbox
from tureen.text.chat_template import FAILURES, ChatTemplate
from tureen.text.control_tokens import ControlTokens
from tureen.text.messages import Tool

NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}
CONTROLS = ControlTokens(make_byte_tokenizer("<|im_start|>", "<|im_end|>"), {"<image>": -2})
TOOL = Tool(name="weather", description="of a city", parameters={"type": "object"})
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
LIMIT_S = 0.05
"""A template is rendered a dozen times before it is used."""


def chat(text: str) -> list[dict]:
    return [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": text, "tool_call_id": "abcdef123", "name": "weather"},
    ]


def run(data: bytes) -> None:
    """Up to the first NUL the template, then the client's text."""
    source, _, text = data.decode("utf-8", "replace").partition("\0")
    with mock.patch.object(template_sandbox, "LIMIT_S", LIMIT_S), contextlib.suppress(*FAILURES):
        template = ChatTemplate(source, CONTROLS, tokens=NAMED, placeholders={"image": "<image>"})
        rendered = template.render(chat(text), [TOOL])
        assert len(rendered) <= template_sandbox.MAX_CHARS
        CONTROLS.encode(rendered)
