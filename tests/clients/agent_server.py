"""Flags of a server for agents, whose instructions are longer than the default model can follow.

Its template shows the model the last message and little else. The prompts of these checks ask the model to repeat a
tool call, so that it calls the tool.
"""

from __future__ import annotations

import json
from pathlib import Path

FLAGS = {
    "--chat-template": str(Path(__file__).with_name("last_message.jinja")),
    "--tool-call-parser": "hermes",
    "--preferred-sampling-params": json.dumps({"temperature": 0, "max_new_tokens": 200}),
}
OPTIONS = tuple(word for flag in FLAGS.items() for word in flag)


def repeat_call(name: str, arguments: object) -> str:
    """Return a prompt after which the default model calls the tool."""
    return f"Repeat: <tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
