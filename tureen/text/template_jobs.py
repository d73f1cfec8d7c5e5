"""Jobs of rendering a chat template, as bytes: a process that can be ended does them, see requests/template_pool.py.

A job is written here and trusted; the answer comes from where a stranger's template ran, and is read as text only.
"""

from __future__ import annotations

import functools
import marshal
from datetime import datetime
from types import CodeType
from typing import Any, Final, NamedTuple

from jinja2 import Template

from tureen.text.template_sandbox import MAX_CHARS, OverLimit, Role, Sandbox

TEXT, LIMIT, FAILURE = b"t", b"l", b"f"
"""The first byte of an answer: the rendering follows, or what limit was hit, or the error's class, a space and text."""
MAX_KEPT: Final = 8  # compiled templates
MAX_SAID: Final = 4096  # characters of an error
MAX_ANSWER_BYTES: Final = 4 * MAX_CHARS + 1


class Failed(Exception):
    """A template raised an error. `kind`: the name of its class."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind


class Variables(NamedTuple):
    """The variables that a template is rendered with."""

    values: dict[str, Any]
    role_mark: str = ""  # what the roles of `messages` are marked with; "" = they are not


def write_job(code: bytes, variables: Variables) -> bytes:
    """Writes a job. `code`: of the compiled template, marshalled. Raises ValueError for values nested too deeply."""
    return marshal.dumps((code, *variables, datetime.now().isoformat()))


def do_job(job: bytes) -> bytes:
    """Renders a template and returns the answer. Takes up to LIMIT_S of CPU time, or for ever in a single operation
    that a hostile template asks for."""
    code, values, role_mark, now = marshal.loads(job)
    if role_mark:
        values["messages"] = [
            {**message, "role": Role.marked_with(role_mark, message["role"])} for message in values["messages"]
        ]
    try:
        text = _sandbox().render(_template(code), values, now=datetime.fromisoformat(now))
    except OverLimit as error:
        return LIMIT + str(error.message).encode()
    except MemoryError:
        return LIMIT + b"it takes too much memory"
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        said = str(error)[:MAX_SAID].encode("utf-8", "surrogatepass")
        return FAILURE + type(error).__name__.encode() + b" " + said
    return TEXT + text.encode("utf-8", "surrogatepass")


def read_answer(answer: bytes) -> str:
    """Returns the rendering. Raises OverLimit, Failed."""
    text = answer[1:].decode("utf-8", "surrogatepass" if answer[:1] == TEXT else "replace")
    if answer[:1] == TEXT:
        return text
    if answer[:1] == LIMIT:
        raise OverLimit(text)
    kind, _, said = text.partition(" ")
    raise Failed(kind, said)


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()


@functools.lru_cache(MAX_KEPT)
def _template(code: bytes) -> Template:
    compiled: CodeType = marshal.loads(code)
    return Template.from_code(_sandbox(), compiled, _sandbox().make_globals(None))
