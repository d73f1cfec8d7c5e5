"""Formats of structural tags that name tokens, as formats of their texts.

No output holds special tokens, and what is written as their text reads the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tureen.errors import echo
from tureen.grammar.expression import GrammarError
from tureen.grammar.json_text import keys, listed, string, strings


def as_text(value: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the format of texts in the place of one that names tokens. Raises GrammarError."""
    name = value.get("type")
    rewrite = TOKEN_FORMATS.get(name) if isinstance(name, str) else None
    return value if rewrite is None else rewrite(value, path)


def text_or_token(value: Any, path: str) -> str:
    """Returns a text, or that of a token. Raises GrammarError."""
    if isinstance(value, dict):
        keys(value, path, ("token",), ("type",))
        return _token_text(value["token"], f"{path}.token")
    return string(value, path)


def _token_text(value: Any, path: str) -> str:
    """The text of a token: no output holds special tokens, and what is written as their text reads the same."""
    if isinstance(value, int):
        raise GrammarError(f"{path} {echo(value)} is a number; write the token's text")
    if not string(value, path):
        raise GrammarError(f"{path} is empty; write the token's text")
    return string(value, path)


def _token_texts(value: Any, path: str) -> list[str]:
    items = listed(value, path) if value != [] else []
    return list(strings([_token_text(item, f"{path}[{at}]") for at, item in enumerate(items)], path, may_be_none=True))


def _token(value: dict[str, Any], path: str) -> dict[str, Any]:
    keys(value, path, ("type", "token"))
    return {"type": "const_string", "value": _token_text(value["token"], f"{path}.token")}


def _exclude_token(value: dict[str, Any], path: str) -> dict[str, Any]:
    raise GrammarError(f"{path}.type 'exclude_token' is not supported: one token is no certain text; use regex")


def _any_tokens(value: dict[str, Any], path: str) -> dict[str, Any]:
    keys(value, path, ("type",), ("exclude_tokens", "max_tokens"))
    excludes = _token_texts(value.get("exclude_tokens", []), f"{path}.exclude_tokens")
    return {"type": "any_text", "excludes": excludes, "max_tokens": value.get("max_tokens")}


def _triggered_tags(value: dict[str, Any], path: str) -> dict[str, Any]:
    keys(value, path, ("type", "trigger_tokens", "tags"), ("at_least_one", "stop_after_first", "exclude_tokens"))
    rewritten = {name: item for name, item in value.items() if name not in ("trigger_tokens", "exclude_tokens")}
    triggers = _token_texts(value["trigger_tokens"], f"{path}.trigger_tokens")
    excludes = _token_texts(value.get("exclude_tokens", []), f"{path}.exclude_tokens")
    return rewritten | {"type": "triggered_tags", "triggers": triggers, "excludes": excludes}


def _dispatch(value: dict[str, Any], path: str) -> dict[str, Any]:
    keys(value, path, ("type", "rules"), ("loop", "exclude_tokens"))
    rules = []
    for at, item in enumerate(listed(value["rules"], f"{path}.rules")):
        is_rule = isinstance(item, list) and item
        rules.append([_token_text(item[0], f"{path}.rules[{at}][0]"), *item[1:]] if is_rule else item)
    excludes = _token_texts(value.get("exclude_tokens", []), f"{path}.exclude_tokens")
    return {"type": "dispatch", "rules": rules, "loop": value.get("loop", True), "excludes": excludes}


TOKEN_FORMATS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "token": _token,
    "exclude_token": _exclude_token,
    "any_tokens": _any_tokens,
    "token_triggered_tags": _triggered_tags,
    "token_dispatch": _dispatch,
}
