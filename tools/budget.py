"""Fails when a file, function or class outgrows the house limits (docs/architecture.md)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES, CLASS_LINES, ATTRIBUTES = 500, 50, 250, 15


def main() -> int:
    complaints: list[str] = []
    for path in sorted((ROOT / "tureen").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        name = path.relative_to(ROOT).as_posix()
        if lines > FILE_LINES:
            complaints.append(f"{name}: {lines} lines, at most {FILE_LINES}")
        complaints += [f"{name}:{complaint}" for complaint in _oversized(ast.parse(text))]
    for complaint in complaints:
        print(complaint)
    if complaints:
        print("Find the second concept in it; raising a limit takes a note in docs/decisions/.")
    return 1 if complaints else 0


def _oversized(tree: ast.AST) -> list[str]:
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            problems += _over(node, f"function {node.name}", FUNCTION_LINES)
        elif isinstance(node, ast.ClassDef):
            table = sum((field.end_lineno or 0) - field.lineno + 1 for field in node.body if _is_declared(field))
            problems += _over(node, f"class {node.name}", CLASS_LINES, table)
            count = len(_attributes(node))
            if count > ATTRIBUTES:
                problems.append(f"{node.lineno}: class {node.name}: {count} attributes, at most {ATTRIBUTES}")
    return problems


def _is_declared(node: ast.stmt) -> bool:
    """A field of a struct: a line of a table, not of a program."""
    return isinstance(node, ast.AnnAssign)


def _over(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, what: str, limit: int, uncounted: int = 0
) -> list[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1 - uncounted
    return [f"{node.lineno}: {what}: {lines} lines, at most {limit}"] if lines > limit else []


def _attributes(node: ast.ClassDef) -> set[str]:
    """Attributes assigned on self; the fields of a declared struct are data, not state."""
    return {
        target.attr
        for child in ast.walk(node)
        if isinstance(child, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target in (child.targets if isinstance(child, ast.Assign) else [child.target])
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


if __name__ == "__main__":
    sys.exit(main())
