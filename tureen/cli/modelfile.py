"""Reads Ollama's Modelfiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tureen.errors import InvalidRequest
from tureen.files import read_text

INSTRUCTIONS: Final = (
    "FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "MESSAGE",
    "LICENSE", "RENDERER", "PARSER", "REQUIRES", "DRAFT",
)  # fmt: skip
MAX_BYTES: Final = 1 << 20
QUOTES: Final = ('"""', '"')


class Instruction(NamedTuple):
    """An instruction of a Modelfile. `key`: the parameter or the role, for PARAMETER and MESSAGE."""

    name: str
    key: str
    value: str

    @property
    def line(self) -> str:
        """Returns how it begins, for messages."""
        text = " ".join(part for part in (self.name, self.key, self.value.strip().partition("\n")[0]) if part)
        return text if len(text) <= 60 else f"{text[:60]}…"


def read_modelfile(path: Path) -> list[Instruction]:
    """Returns the instructions of a Modelfile. Raises InvalidRequest naming the line at fault."""
    try:
        text = read_text(path, max_bytes=MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    instructions = list(_instructions(text, path))
    if not any(each.name == "FROM" for each in instructions):
        raise InvalidRequest(f"{path}: has no FROM line, which names the model")
    return instructions


def _instructions(text: str, path: Path) -> Iterator[Instruction]:
    lines = iter(enumerate(text.split("\n"), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, rest = line.strip().partition(" ")
        if name.upper() not in INSTRUCTIONS:
            raise InvalidRequest(f"{path}, line {number}: {name[:40]!r} is none of {', '.join(INSTRUCTIONS)}")
        key = ""
        if name.upper() in ("PARAMETER", "MESSAGE"):
            key, _, rest = rest.strip().partition(" ")
        value = _unquoted(rest)
        while value is None:
            try:
                rest += "\n" + next(lines)[1]
            except StopIteration:
                raise InvalidRequest(f"{path}, line {number}: {name} has no closing quote") from None
            value = _unquoted(rest)
        yield Instruction(name.upper(), key, value)


def _unquoted(text: str) -> str | None:
    """Returns a value without its quotes; None = they are not closed yet."""
    value = text.strip()
    for quote in QUOTES:
        if value.startswith(quote):
            is_closed = len(value) >= 2 * len(quote) and value.endswith(quote)
            return value[len(quote) : -len(quote)] if is_closed else None
    return value
