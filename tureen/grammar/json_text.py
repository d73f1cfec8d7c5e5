"""The JSON texts of constraints, read strictly: what a place must hold, and what it may."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NoReturn

from tureen.errors import echo
from tureen.grammar.expression import GrammarError


def exact(digits: str, name: str) -> Decimal:
    """Reads a number with a fraction or exponent. Raises GrammarError for an exponent that is too large."""
    try:
        return Decimal(digits)
    except ArithmeticError:
        raise GrammarError(f"{name} has a number with too many digits: {echo(digits)}; write fewer") from None


def decoded(text: str, name: str) -> Any:
    """Raises GrammarError, also for a key given twice and a number that a float does not hold exactly."""

    def number(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")) or Decimal(repr(value)) != exact(digits, name):
            raise GrammarError(f"{name} has a number with too many digits: {echo(digits)}; write fewer")
        return value

    def constant(word: str) -> NoReturn:
        raise GrammarError(f"{name} is not valid JSON: {word} is not a number of JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            times = Counter(key for key, _ in pairs)
            twice = next(key for key in times if times[key] > 1)
            raise GrammarError(f"{name} has the key {echo(twice)} twice in one object; remove one")
        return value

    try:
        return json.loads(text, parse_float=number, parse_constant=constant, object_pairs_hook=unique)
    except RecursionError:
        raise GrammarError(f"{name} is nested too deep; nest less") from None
    except ValueError as error:
        raise GrammarError(f"{name} is not valid JSON: {error}") from None


def keys(value: Any, path: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raises GrammarError unless `value` is an object with these keys."""
    if not isinstance(value, dict):
        raise GrammarError(f"{path} must be an object, got {echo(value)}")
    for key in value:
        if key not in required and key not in optional:
            raise GrammarError(f"{path} has an unknown key {echo(key)}; known are {', '.join((*required, *optional))}")
    for key in required:
        if key not in value:
            raise GrammarError(f"{path} lacks {echo(key)}; add it")


def string(value: Any, path: str) -> str:
    """Returns a value that must be a string of characters. Raises GrammarError."""
    if not isinstance(value, str):
        raise GrammarError(f"{path} must be a string, got {echo(value)}")
    check_characters(value, path)
    return value


def check_characters(text: str, name: str) -> None:
    """Raises GrammarError where one half of a surrogate pair stands alone, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(
            f"{name} holds half of a surrogate pair (\\ud800 to \\udfff); write whole characters"
        ) from None


def listed(value: Any, path: str) -> list[Any]:
    """Returns a value that must be a list that is not empty. Raises GrammarError."""
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{path} must be a list that is not empty, got {echo(value)}")
    return value


def strings(value: Any, path: str, *, may_be_none: bool = False) -> tuple[str, ...]:
    """Returns a value that must be a list of different strings that are not empty. Raises GrammarError."""
    if may_be_none and value == []:
        return ()
    texts: dict[str, None] = {}
    for at, item in enumerate(listed(value, path)):
        if string(item, f"{path}[{at}]") == "":
            raise GrammarError(f"{path}[{at}] is empty; remove it or write a text")
        if item in texts:
            raise GrammarError(f"{path}[{at}] is a duplicate: {echo(item)}; remove one")
        texts[item] = None
    return tuple(texts)


def integer(value: Any, path: str, most: int | None = None) -> int:
    """Returns a value that must be an integer from 0 to `most`. Raises GrammarError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (most is not None and value > most):
        bound = "0 or more" if most is None else f"0 to {most}"
        raise GrammarError(f"{path} must be an integer, {bound}, got {echo(value)}")
    return value


def flag(value: Any, path: str) -> bool:
    """Returns a value that must be true or false. Raises GrammarError."""
    if not isinstance(value, bool):
        raise GrammarError(f"{path} must be true or false, got {echo(value)}")
    return value
