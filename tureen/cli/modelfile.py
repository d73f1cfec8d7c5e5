"""Reads Ollama's Modelfiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tureen.errors import InvalidRequest, echo
from tureen.files import read_text

INSTRUCTIONS: Final = (
    "FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "MESSAGE",
    "LICENSE", "RENDERER", "PARSER", "REQUIRES", "DRAFT",
)  # fmt: skip
MAX_BYTES: Final = 1 << 20
ROLES: Final = ("system", "user", "assistant")
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
    lines = iter(enumerate(text.removeprefix("\ufeff").split("\n"), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, rest = _first_word(line)
        where = f"{path}, line {number}"
        if name.upper() not in INSTRUCTIONS:
            raise InvalidRequest(f"{where}: {echo(name)} is none of {', '.join(INSTRUCTIONS)}")
        key = ""
        if name.upper() in ("PARAMETER", "MESSAGE"):
            key, rest = _first_word(rest)
            _check_key(name.upper(), key, where)
        value = _quoted(rest.strip(), lines)
        if value is None:
            raise InvalidRequest(f"{where}: {name} has no closing quote")
        if not value and name.upper() == "FROM":
            raise InvalidRequest(f"{where}: FROM names no model")
        yield Instruction(name.upper(), key, value)


def _first_word(text: str) -> tuple[str, str]:
    """Returns the first word, and what follows the spaces or tabs after it."""
    word, *rest = text.split(maxsplit=1) or [""]
    return word, rest[0] if rest else ""


def _check_key(name: str, key: str, where: str) -> None:
    """Raises InvalidRequest for a role that no message has, and for a parameter that is not one word in small letters:
    the table that translates parameters has flags and variables, too."""
    if name == "MESSAGE" and key not in ROLES:
        raise InvalidRequest(f"{where}: MESSAGE {echo(key)} must be one of {', '.join(ROLES)}")
    if name == "PARAMETER" and not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        raise InvalidRequest(f"{where}: {echo(key)} is not an Ollama parameter; temperature is one")


def _quoted(first: str, lines: Iterator[tuple[int, str]]) -> str | None:
    """Returns a value without its quotes, with the lines up to the one that ends with them; None = they are not closed.

    first: what follows the instruction, without the spaces around it.
    """
    quote = next((quote for quote in QUOTES if first.startswith(quote)), None)
    if quote is None:
        return first
    texts = [first[len(quote) :]]
    while not texts[-1].rstrip().endswith(quote):
        following = next(lines, None)
        if following is None:
            return None
        texts.append(following[1])
    texts[-1] = texts[-1].rstrip()[: -len(quote)]
    return "\n".join(texts)
