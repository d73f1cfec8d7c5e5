"""Finds prose that only its author can read: names that say nothing, worn words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

EMPTY_NAMES = frozenset({"one", "found", "given", "made", "wanted"})
"""Names that fit every variable, and every function."""

WORN_WORDS = re.compile(
    r"\b(nobody|somebody|everybody|whoever|anew|(?:is|are|was|were) told|where there is none|but for)\b", re.IGNORECASE
)
"""Words of messages, descriptions and pages for which the field has better ones: no request, a client, the engine;
everyone; rebuilt; reported; if absent; except."""


def empty_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of each variable, argument or function that is called one of EMPTY_NAMES, where it gets its
    value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in EMPTY_NAMES:
            yield node.lineno, node.name


def worn_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and word of each of WORN_WORDS in a page or a table."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in WORN_WORDS.finditer(line):
            yield number, match[0]


def worn_messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line number and word of each of WORN_WORDS in a module's strings, docstrings excepted."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for match in WORN_WORDS.finditer(node.value):
                yield node.lineno, match[0]
