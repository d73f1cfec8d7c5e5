"""Finds prose that only its author can read: docstrings without a subject, variables whose name says nothing.

It knows first words, not grammar: it finds the commonest faults and misses others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

RIDDLES = frozenset(
    "Of What Where Those Which Whose So By From As Until Without Why That Who When".split()  # noqa: SIM905
)
"""First words of docstrings that have no subject, or that are half of a sentence begun elsewhere."""

EMPTY_NAMES = frozenset({"one", "found", "given", "made", "wanted"})
"""Names that fit every variable, and every function."""


def riddles(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and first line of each docstring that begins with one of RIDDLES; attributes' and data's too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words = node.value.value.split(maxsplit=1)
            if words and words[0].rstrip(",:;.") in RIDDLES:
                yield node.lineno, node.value.value.strip().splitlines()[0]


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
