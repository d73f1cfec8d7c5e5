"""Tokens that structural tags name by their numbers, and the texts of these."""

from __future__ import annotations

from typing import Any

from tureen.grammar.base import Vocabulary
from tureen.grammar.expression import GrammarError

LISTS = ("exclude_tokens", "trigger_tokens")
PARTS = ("format", "elements", "content", "tags", "rules", "begin", "end")
"""The parts of formats that hold others; what schemas say is not about tokens."""


def with_token_texts(value: Any, vocabulary: Vocabulary, path: str = "structural_tag") -> Any:
    """Returns a structural tag, or a part of it, with texts instead of the numbers of tokens. Raises GrammarError."""
    if isinstance(value, list):
        return [with_token_texts(item, vocabulary, f"{path}[{at}]") for at, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    changed = {}
    for key, item in value.items():
        place = f"{path}.{key}"
        if key == "token":
            item = _text(item, vocabulary, place)
        elif key in LISTS and isinstance(item, list):
            item = [_text(token, vocabulary, f"{place}[{at}]") for at, token in enumerate(item)]
        elif key in PARTS:
            item = with_token_texts(item, vocabulary, place)
        if key == "rules" and value.get("type") == "token_dispatch" and isinstance(item, list):
            item = [_rule(rule, vocabulary, f"{place}[{at}][0]") for at, rule in enumerate(item)]
        changed[key] = item
    return changed


def _rule(rule: Any, vocabulary: Vocabulary, path: str) -> Any:
    return [_text(rule[0], vocabulary, path), *rule[1:]] if isinstance(rule, list) and rule else rule


def _text(token: Any, vocabulary: Vocabulary, path: str) -> Any:
    """Returns the text of a number. What is none is left to be refused by those who read it."""
    if type(token) is not int:
        return token
    special = dict(vocabulary.specials).get(token)
    known = special or (vocabulary.tokens[token] if 0 <= token < len(vocabulary.tokens) else b"")
    try:
        text = known.decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise GrammarError(f"{path} {token} is not a token with text; write another one, or a text")
    return text
