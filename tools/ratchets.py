"""Fails when a figure of the code is worse than tools/ratchets.json allows. Figures only fall.

    tools/ratchets.py                         compares, names each that has risen
    tools/ratchets.py --list "class names"    what a figure counts, place by place
    tools/ratchets.py --write                 lowers the file to what the code has now
    tools/ratchets.py --feature api "drafts"  a named feature: its package may have as many lines of code as it has now

"test suite" holds the processor seconds of the gate in tests/costs.json, the tests that may leave their process, and
the known flakes.

The walk of a request is measured by tests/sim/test_walk.py, and lowered by hand.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from import_rules import ROOT, cycles, module_graph, read_modules, room, room_graph
from prose import empty_names, riddles, worn_messages, worn_words

DATA = ROOT / "tools" / "ratchets.json"
FOOTPRINTS = ("min_p", "json_schema", "cache_salt", "lora_path")
"""Parameters whose names should stand in few files."""
RECORDED_PAGE = "clients.md"
"""A page of docs/ with messages as a run of clients recorded them."""
LINES, FEATURES, SUITE = "lines of code", "features", "test suite"
SILENT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
"""Kinds of tokens that are no code."""

Places = dict[str, dict[str, list[str]]]
"""Figure -> key -> where each thing stands that is counted under the key."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--list", metavar="FIGURE")
    parser.add_argument("--feature", nargs=2, metavar=("PACKAGE", "NAME"))
    args = parser.parse_args()
    places, lines, suite = measure(), count_lines(), measure_suite()
    if args.list:
        for key, entries in places[args.list].items():
            print(f"{key}: {len(entries)}", *(f"  {entry}" for entry in entries), sep="\n")
        return 0
    allowed = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    if args.feature:
        _add_feature(allowed, lines, *args.feature)
        _save(allowed)
    elif args.write:
        _save(lowered(allowed, places, lines) | {SUITE: lowered_suite(allowed.get(SUITE, {}), suite)})
    complaints = [] if args.write else [*compare(allowed, places, lines), *compare_suite(allowed.get(SUITE, {}), suite)]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


def measure() -> Places:
    """Walks the package's source once."""
    modules = read_modules()
    places: Places = {
        "import cycles": _numbered(cycles(module_graph(modules))),
        "package cycles": _numbered(cycles(room_graph(modules))),
        "class names": {},
        "footprint": {name: [] for name in FOOTPRINTS},
        "docstrings without a subject": defaultdict(list),
        "names that say nothing": defaultdict(list),
        "worn words": {"pages": worn_pages()},
    }
    classes: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        text = module.path.read_text(encoding="utf-8")
        tree, place = ast.parse(text), module.path.relative_to(ROOT).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{place}:{node.lineno}")
        for figure, hits in (
            ("docstrings without a subject", riddles(tree)),
            ("names that say nothing", empty_names(tree)),
            ("worn words", worn_messages(tree)),
        ):
            for line, what in hits:
                places[figure].setdefault(room(name) or "tureen", []).append(f"{place}:{line}: {what}")
        for parameter in FOOTPRINTS:
            if re.search(rf"\b{parameter}\b", text):
                places["footprint"][parameter].append(place)
    places["class names"] = {name: where for name, where in sorted(classes.items()) if len(where) > 1}
    return places


def worn_pages() -> list[str]:
    """Return the places of worn words in the guides and in the package's tables of reasons."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tureen").rglob("*.toml"))]
    return [
        f"{page.relative_to(ROOT).as_posix()}:{line}: {word}"
        for page in pages
        if page.name != RECORDED_PAGE
        for line, word in worn_words(page.read_text(encoding="utf-8"))
    ]


def measure_suite() -> dict[str, int]:
    """Return the figures of the test suite. Each may only fall. The gate has seconds once a whole run wrote them."""
    tests = ROOT / "tests"
    lanes = json.loads((tests / "costs.json").read_text(encoding="utf-8"))["lanes"]
    seconds = {"processor seconds of the gate": round(lanes["gate"][1])} if "gate" in lanes else {}
    return seconds | {
        "exceptions of the gate": _count_entries(tests / "gate_exceptions.py"),
        "known flakes": _count_entries(tests / "flakes.py"),
    }


def compare_suite(allowed: Mapping[str, int], suite: Mapping[str, int]) -> list[str]:
    return [
        f"tests: {name}: {count}, at most {allowed[name]}" for name, count in suite.items() if count > allowed[name]
    ]


def lowered_suite(allowed: Mapping[str, int], suite: Mapping[str, int]) -> dict[str, int]:
    return {name: min(count, allowed.get(name, count)) for name, count in suite.items()}


def _count_entries(path: Path) -> int:
    """Count the entries of the dictionaries that a file assigns."""
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    tables = [node.value for node in statements if isinstance(node, ast.AnnAssign)]
    return sum(len(table.keys) for table in tables if isinstance(table, ast.Dict))


def count_lines() -> dict[str, int]:
    """Lines of code by package, without blank lines, comments and docstrings: explaining costs nothing.

    Modules beside the packages count together, as `tureen`.
    """
    totals: dict[str, int] = defaultdict(int)
    for path in sorted((ROOT / "tureen").rglob("*.py")):
        parts = path.relative_to(ROOT / "tureen").parts
        totals[parts[0] if len(parts) > 1 else "tureen"] += len(code_lines(path.read_text(encoding="utf-8")))
    return dict(totals)


def code_lines(text: str) -> set[int]:
    """Returns the numbers of the lines of a source that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in SILENT for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def compare(allowed: Mapping[str, Mapping[str, int]], places: Places, lines: Mapping[str, int]) -> list[str]:
    """Returns a sentence for each figure that is worse than it may be."""
    complaints = []
    for figure, keys in places.items():
        for key, entries in keys.items():
            limit = allowed.get(figure, {}).get(key, 0)
            if len(entries) > limit:
                complaints.append(
                    f"{figure}, {key}: {len(entries)}, at most {limit} (tools/ratchets.py --list {figure!r})"
                )
    for package, count in lines.items():
        limit = line_limit(allowed, package)
        if count > limit:
            complaints.append(
                f"tureen/{package}: {count} lines of code, at most {limit}: take something out, or name "
                f"what they are for: tools/ratchets.py --feature {package} 'a few words'"
            )
    return complaints


def line_limit(allowed: Mapping[str, Mapping[str, int]], package: str) -> int:
    """Lines that a package may have: those that it had, and those of the features that were named since."""
    features = allowed.get(FEATURES, {})
    return allowed.get(LINES, {}).get(package, 0) + sum(
        count for name, count in features.items() if name.startswith(f"{package}: ")
    )


def lowered(
    allowed: Mapping[str, Mapping[str, int]], places: Places, lines: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Returns the file's new content: no figure rises, one that the file does not have yet is added."""
    data = {figure: dict(keys) for figure, keys in allowed.items()}
    for figure, keys in places.items():
        limits = data.get(figure)
        counts = {key: len(entries) for key, entries in keys.items()}
        data[figure] = counts if limits is None else {
            key: min(limit, counts[key]) for key, limit in limits.items() if counts.get(key)
        }  # fmt: skip
    data.setdefault(FEATURES, {})
    limits = data.get(LINES)
    data[LINES] = dict(lines) if limits is None else {
        package: limit - max(0, line_limit(data, package) - lines.get(package, 0))
        for package, limit in limits.items() if package in lines
    }  # fmt: skip
    return data


def _add_feature(allowed: dict[str, dict[str, int]], lines: Mapping[str, int], package: str, name: str) -> None:
    if package not in lines:
        sys.exit(f"no package {package!r}; there are: {', '.join(lines)}")
    more = lines[package] - line_limit(allowed, package)
    if more > 0:
        key = f"{package}: {name}"
        features = allowed.setdefault(FEATURES, {})
        features[key] = features.get(key, 0) + more


def _numbered(circles: list[list[str]]) -> dict[str, list[str]]:
    return {"all": [" <-> ".join(circle) for circle in circles]}


def _save(data: Mapping[str, Mapping[str, int]]) -> None:
    DATA.write_text(json.dumps(data, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
