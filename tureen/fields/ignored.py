"""Records the ignored fields of each request, which were accepted and have no effect. The answer lists them.

telling.tell("tools[0].eager_input_streaming", "a tool's input is always streamed as it comes")
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from tureen.errors import InvalidRequest
from tureen.log import get_logger

ANSWER_FIELD = "ignored_fields"
"""Name of the list in answers that have a field for it."""

UNKNOWN = "unknown"
"""Label in the metrics of all fields that no table names."""

MAX_PATHS, MAX_PATH_CHARS, MAX_HEADER_CHARS = 64, 128, 1024
SAFE = "[]/:@$"
"""Characters that a path in the header keeps, in addition to letters, digits and `_.-~`."""

_INDEX = re.compile(r"\[\d+\]")

log = get_logger("api")


UnknownFields = Literal["refuse", "tell"]


@dataclass
class Telling:
    """The ignored fields of one request, and whether such fields are refused."""

    is_strict: bool = False  # they are refused
    unknown_fields: UnknownFields | None = None  # those that no table names; None: as the dialect has it
    paths: dict[str, None] = field(default_factory=dict)  # in the order in which they were found
    labels: dict[str, None] = field(default_factory=dict)  # names in the metrics
    unknown_names: set[str] = field(default_factory=set)  # that no API has, and that were reported
    num_more: int = 0  # fields that are not in `paths`, which is bounded

    def header(self) -> bytes:
        """Returns the value of the answer's header: paths in printable ASCII, other characters percent-encoded."""
        parts: list[str] = []
        num_chars = 0
        for path in self.paths:
            part = quote(path, safe=SAFE, errors="replace")
            num_chars += len(part) + 2
            if num_chars > MAX_HEADER_CHARS:
                break
            parts.append(part)
        num_left = len(self.paths) - len(parts) + self.num_more
        return ", ".join([*parts, f"and {num_left} more"] if num_left else parts).encode("ascii")

    def listed(self) -> list[str]:
        """Returns the list for an answer's body."""
        return [*self.paths, f"and {self.num_more} more"] if self.num_more else list(self.paths)


current: ContextVar[Telling | None] = ContextVar("telling", default=None)
"""The Telling of the HTTP request that this task, or a thread that works for it, serves; None in tureen.Engine."""


def tell(path: str, why: str, *, is_declared: bool = True) -> None:
    """Reports the field at `path`, such as `tools[0].strict`, as ignored. `why`: the reason, for a client that asks for
    errors instead. `is_declared`: false for a name that no table has.

    Raises InvalidRequest for a request with the header `x-tureen-strict: 1`.
    """
    telling, path = current.get(), path[:MAX_PATH_CHARS]
    if telling is None:
        log.warning("the field %a has no effect: %s", path, why)
        return
    if telling.is_strict:
        raise InvalidRequest(
            f"{path} would have no effect, which the header x-tureen-strict makes an error: {why}",
            field=path,
            code="no_effect",
        )
    telling.labels[label_of(path) if is_declared else UNKNOWN] = None
    if path in telling.paths:
        return
    if len(telling.paths) < MAX_PATHS:
        telling.paths[path] = None
    else:
        telling.num_more += 1


def label_of(path: str) -> str:
    """Returns a path without its indices: `tools[].strict`."""
    return _INDEX.sub("[]", path)


def answer_field() -> dict[str, Any]:
    """Returns the field of an answer that lists ignored fields; {} without any."""
    telling = current.get()
    return {ANSWER_FIELD: telling.listed()} if telling is not None and telling.paths else {}
