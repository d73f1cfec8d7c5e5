"""Reads chat templates in JSON, as SGLang's --chat-template takes them, and writes them as Jinja templates.

Source: https://docs.sglang.io/references/custom_chat_template.html; what the styles mean is that of FastChat's
conversation.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from tureen.errors import StartupError


class Style(NamedTuple):
    """How a style writes a chat: a role, a mark, its text, a separator; at last a role and a mark, to be answered."""

    mark: str  # between the name of a role and its text
    last: str  # behind the name of the assistant that is to answer
    system_separator: str = "sep"  # behind the system's message: an expression of Jinja
    separator: str = "sep"  # behind a message
    omits_system: bool = False  # whether an empty system message, with its frame, is left out


ALTERNATING: Final = "(sep if loop.index0 % 2 == 0 else sep2)"
STYLES: Final = {
    "ADD_COLON_SINGLE": Style(": ", ":"),
    "ADD_COLON_TWO": Style(": ", ":", separator=ALTERNATING),
    "ADD_COLON_SPACE_SINGLE": Style(": ", ": "),
    "NO_COLON_SINGLE": Style("", "", system_separator="''"),
    "NO_COLON_TWO": Style("", "", system_separator="''", separator=ALTERNATING),
    "ADD_NEW_LINE_SINGLE": Style("\n", "\n"),
    "CHATML": Style("\n", "\n", system_separator="sep + '\n'", separator="sep + '\n'"),
    "CHATGLM3": Style("\n", "", system_separator="''", separator="''", omits_system=True),
    "ROBIN": Style(":\n", ":\n"),
    "FALCON_CHAT": Style(": ", ":", omits_system=True),
    "DEEPSEEK_CHAT": Style(": ", ":", system_separator="''", separator=ALTERNATING),
    "MPT": Style("", ""),
}
"""FastChat's styles by name; those of single models, which no file can describe, are missing."""


class TemplateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a template in JSON."""

    name: str
    system: str  # stands before the system's message, and a new line
    user: str
    assistant: str
    sep_style: str
    stop_str: str | list[str]
    sep: str = "\n"
    sep2: str = ""
    system_message: str = ""  # where a chat has none


class JsonTemplate(NamedTuple):
    """A template as Jinja, and the strings that end an answer."""

    source: str
    stops: tuple[str, ...]


def read_json_template(text: str, file: str) -> JsonTemplate:
    """Reads a template; `file` is its name for errors. Raises StartupError."""
    try:
        fields = msgspec.json.decode(text, type=TemplateFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise StartupError(f"--chat-template {file}: {error}", field="chat_template") from None
    style = STYLES.get(fields.sep_style)
    if style is None:
        known = ", ".join(STYLES)
        raise StartupError(
            f"--chat-template {file}: sep_style {fields.sep_style!r} is not supported: use {known}, or a .jinja file",
            field="chat_template",
        )
    stops = (fields.stop_str,) if isinstance(fields.stop_str, str) else tuple(fields.stop_str)
    return JsonTemplate(_as_jinja(fields, style), tuple(stop for stop in stops if stop))


def _as_jinja(fields: TemplateFile, style: Style) -> str:
    """Returns the template as Jinja: strings of the file are its literals, texts of messages its variables."""
    system, default = f"{fields.system + chr(10)!r}", f"{fields.system_message!r}"
    frame = f"{{{{ {system} + told.system + {style.system_separator} }}}}"
    whole = f"{{% if told.system %}}{frame}{{% endif %}}" if style.omits_system else frame
    return (
        f"{{% set sep, sep2 = {fields.sep!r}, {fields.sep2!r} %}}"
        f"{{% set told = namespace(system={default}) %}}"
        "{% for message in messages if message.role == 'system' %}"
        "{% set told.system = message.content or '' %}{% endfor %}"
        f"{whole}"
        "{% for message in messages if message.role != 'system' %}"
        f"{{% if message.role == 'assistant' %}}{{{{ {fields.assistant!r} }}}}"
        f"{{% else %}}{{{{ {fields.user!r} }}}}{{% endif %}}"
        f"{{% if message.content %}}{{{{ {style.mark!r} + message.content + {style.separator} }}}}"
        f"{{% else %}}{{{{ {style.last!r} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {fields.assistant + style.last!r} }}}}{{% endif %}}"
    )
