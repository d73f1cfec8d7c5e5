"""Checks who imports whom against what each package says of itself (docs/architecture.md, Import rules).

The docstring of a package's `__init__`, or of a module that stands beside the packages, ends with these lines:

    Imports: errors, files; msgspec, numpy.
    Imported by: engine, runner.
    Independent: llama, qwen2.

`Imports` names packages of tureen, then after a semicolon the libraries that are not Python's own; asyncio counts as
one. `Imported by` names those who may import it, or says "all". `Independent`, where it stands, names modules of the
package that do not import each other; a word in capitals means all modules that assign that name, "folders" that no
folder of the package imports another.

Imports inside functions and for type checking count as all others do. Every import between packages must be allowed by
both ends, and no permission may be left over. Circles of modules and of packages are counted by tools/ratchets.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tureen"
NOTHING, ANYONE, FOLDERS = "nothing", "all", "folders"
LINE = re.compile(r"^(Imports|Imported by|Independent): (.+?)\.$", re.MULTILINE | re.DOTALL)
WATCHED = frozenset({"asyncio"})
"""Modules of Python's own that a package must name like a library."""


class Rules(NamedTuple):
    """The lines at the end of one docstring. `imported_by` is None where anyone may."""

    imports: frozenset[str]
    libraries: frozenset[str]
    imported_by: frozenset[str] | None
    independent: tuple[str, ...]


class Module(NamedTuple):
    """One file: the modules of the package that it imports, the libraries, the names that it assigns."""

    path: Path
    imports: frozenset[str]
    libraries: frozenset[str]
    assigned: frozenset[str]
    docstring: str

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def main() -> int:
    complaints = check(read_modules())
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


def read_modules() -> dict[str, Module]:
    """Every module of the package by its dotted name, `tureen.` left out; the package itself is ""."""
    paths = {_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    return {name: _read(path, paths) for name, path in paths.items()}


def check(modules: Mapping[str, Module]) -> list[str]:
    """Returns a sentence for each breach of the rules."""
    rooms = {name: module for name, module in modules.items() if name and "." not in name}
    rules = {name: read_rules(module.docstring) for name, module in rooms.items()}
    silent = [
        f"{rooms[name].path.relative_to(ROOT)}: its docstring has no line `Imports: …` or `Imported by: …`"
        for name, rule in rules.items()
        if rule is None
    ]
    if silent:
        return silent
    stated = {name: rule for name, rule in rules.items() if rule is not None}
    return [
        *_breaches(modules, stated),
        *_left_over(modules, stated),
        *_dependent(modules, stated),
    ]


def read_rules(docstring: str) -> Rules | None:
    """Reads the lines at the end of a docstring; None where `Imports` or `Imported by` is missing."""
    lines = {key: " ".join(value.split()) for key, value in LINE.findall(docstring)}
    if "Imports" not in lines or "Imported by" not in lines:
        return None
    inner, _, libraries = lines["Imports"].partition(";")
    importers = lines["Imported by"]
    return Rules(
        frozenset(_names(inner)),
        frozenset(_names(libraries)),
        None if importers == ANYONE else frozenset(_names(importers)),
        tuple(_names(lines.get("Independent", ""))),
    )


def module_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports. `tureen` itself, which imports for type checkers only, is left out."""
    return {name: set(module.imports) - {""} for name, module in modules.items() if name}


def room_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Package, or module beside the packages -> those that it imports."""
    graph: dict[str, set[str]] = {}
    for name, imports in module_graph(modules).items():
        graph.setdefault(room(name), set()).update({room(other) for other in imports} - {room(name)})
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns each largest set of nodes that all reach each other, sorted."""

    @cache
    def reached(start: str) -> frozenset[str]:
        seen: set[str] = set()
        ahead = list(graph.get(start, ()))
        while ahead:
            node = ahead.pop()
            if node not in seen:
                seen.add(node)
                ahead += graph.get(node, ())
        return frozenset(seen)

    circles = {frozenset(other for other in reached(node) if node in reached(other)) for node in graph}
    return sorted(sorted(circle) for circle in circles if circle)


def room(name: str) -> str:
    """Returns the package, or the module beside the packages, that a module belongs to."""
    return name.partition(".")[0]


def _breaches(modules: Mapping[str, Module], rules: Mapping[str, Rules]) -> Iterator[str]:
    for name, module in modules.items():
        if not name:
            continue
        own, place = rules[room(name)], module.path.relative_to(ROOT)
        for other in sorted({room(imported) for imported in module.imports} - {room(name), ""}):
            if other not in own.imports:
                yield f"{place} imports {other}: the docstring of {room(name)} does not say so"
            importers = rules[other].imported_by
            if importers is not None and room(name) not in importers:
                yield f"{place} imports {other}: the docstring of {other} does not allow it"
        for library in sorted(module.libraries - own.libraries):
            yield f"{place} imports {library}: the docstring of {room(name)} does not say so"


def _left_over(modules: Mapping[str, Module], rules: Mapping[str, Rules]) -> Iterator[str]:
    graph = room_graph(modules)
    for name, rule in rules.items():
        inside = [module for other, module in modules.items() if room(other) == name]
        used = frozenset[str]().union(*(module.libraries for module in inside))
        importers = {other for other, imports in graph.items() if name in imports}
        for what, spare in (  # type: tuple[str, frozenset[str]]
            ("Imports", rule.imports - graph[name]),
            ("Imports", rule.libraries - used),
            ("Imported by", (rule.imported_by or frozenset()) - importers),
        ):
            if spare:
                yield f"the docstring of {name} says `{what}: {', '.join(sorted(spare))}`, which is no longer so"


def _dependent(modules: Mapping[str, Module], rules: Mapping[str, Rules]) -> Iterator[str]:
    for name, rule in rules.items():
        members = {other for word in rule.independent for other in _members(modules, name, word)}
        for member in sorted(members):
            for other in sorted(modules[member].imports & members - {member}):
                yield f"{modules[member].path.relative_to(ROOT)} imports {other}: they are to be independent"
        if FOLDERS in rule.independent:
            yield from _crossing(modules, name)


def _crossing(modules: Mapping[str, Module], package: str) -> Iterator[str]:
    """Yields a complaint for each import between two folders of a package."""
    folders = {name for name, module in modules.items() if module.is_package and name.startswith(f"{package}.")}
    for name, module in sorted(modules.items()):
        own = _folder(name)
        for other in sorted(module.imports) if own in folders else ():
            if _folder(other) in folders - {own}:
                yield f"{module.path.relative_to(ROOT)} imports {other}: the folders of {package} are to be independent"


def _folder(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _members(modules: Mapping[str, Module], package: str, word: str) -> list[str]:
    inside = [name for name in modules if name.startswith(f"{package}.")]
    if word.isupper():
        return [name for name in inside if word in modules[name].assigned]
    return [name for name in inside if name == f"{package}.{word}" or name.startswith(f"{package}.{word}.")]


def _names(text: str) -> list[str]:
    return [name for name in re.split(r"[,\s]+|\band\b", text) if name and name != NOTHING]


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(path: Path, known: Mapping[str, Path]) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports, libraries = set(), set()
    for target in _targets(tree):
        first, _, rest = target.partition(".")
        if first == PACKAGE:
            imports.add(rest if rest in known else rest.rpartition(".")[0])
        elif first in WATCHED or first not in sys.stdlib_module_names:
            libraries.add(first)
    assigned = {
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    }
    docstring = ast.get_docstring(tree) or ""
    return Module(path, frozenset(imports), frozenset(libraries), frozenset(assigned), docstring)


def _targets(tree: ast.Module) -> Iterator[str]:
    """Yields what each import statement names, as module or as module.name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    sys.exit(main())
