"""Fails when a figure of the code is worse than tools/ratchets.json allows. Figures only fall.

    tools/ratchets.py                     compares, names each that has risen
    tools/ratchets.py --list footprint    what a figure counts, place by place
    tools/ratchets.py --write             lowers the file to what the code has now
    tools/ratchets.py --size              lines of code of the package, for the change note of a feature

"footprint" holds how many modules name an option of a request. "test suite" holds the processor seconds of the gate in
tests/costs.json, the tests that may leave their process, and the known flakes.

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
from prose import empty_names, worn_messages, worn_words

DATA = ROOT / "tools" / "ratchets.json"
OPTIONS = {
    "contract/params.py": "SamplingParams",
    "requests/drafts.py": "Options",
}
"""Module -> its class whose fields are options of a request."""
EVERYDAY = frozenset(
    {"adapter", "choice", "dtype", "ebnf", "logprobs", "n", "processor", "regex", "stop", "temperature"}
)
"""Options that share their name with other things."""
NEWCOMERS = {"footprint": 4}
"""Figure -> limit of a key that the file does not have yet; 0 for the other figures."""
RECORDED_PAGE = "clients.md"
"""A page of docs/ with messages as a run of clients recorded them."""
SUITE = "test suite"
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
    parser.add_argument("--size", action="store_true")
    args = parser.parse_args()
    if args.size:
        print(f"{count_lines():,} lines of code")
        return 0
    places, suite = measure(), measure_suite()
    if args.list:
        for key, entries in places[args.list].items():
            print(f"{key}: {len(entries)}", *(f"  {entry}" for entry in entries), sep="\n")
        return 0
    allowed = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    if args.write:
        _save(lowered(allowed, places) | {SUITE: lowered_suite(allowed.get(SUITE, {}), suite)})
    complaints = [] if args.write else [*compare(allowed, places), *compare_suite(allowed.get(SUITE, {}), suite)]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


def measure() -> Places:
    """Walks the package's source once."""
    modules = read_modules()
    places: Places = {
        "import cycles": _numbered(cycles(module_graph(modules))),
        "package cycles": _numbered(cycles(room_graph(modules))),
        "footprint": {name: [] for name in options()},
        "names that say nothing": defaultdict(list),
        "worn words": {"pages": worn_pages()},
    }
    for name, module in modules.items():
        text = module.path.read_text(encoding="utf-8")
        tree, place = ast.parse(text), module.path.relative_to(ROOT).as_posix()
        for figure, hits in (
            ("names that say nothing", empty_names(tree)),
            ("worn words", worn_messages(tree)),
        ):
            for line, what in hits:
                places[figure].setdefault(room(name) or "tureen", []).append(f"{place}:{line}: {what}")
        words = set(re.findall(r"\w+", text))
        for option, files in places["footprint"].items():
            if option in words:
                files.append(place)
    return places


def options() -> list[str]:
    """Return the options of a request, without those of everyday names."""
    names = []
    for module, class_name in OPTIONS.items():
        tree = ast.parse((ROOT / "tureen" / module).read_text(encoding="utf-8"))
        [owner] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
        fields = [node.target for node in owner.body if isinstance(node, ast.AnnAssign)]
        names += [field.id for field in fields if isinstance(field, ast.Name) and field.id not in EVERYDAY]
    return names


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


def count_lines() -> int:
    """Count the package's lines of code, without blank lines, comments and docstrings: explaining costs nothing."""
    return sum(len(code_lines(path.read_text(encoding="utf-8"))) for path in (ROOT / "tureen").rglob("*.py"))


def code_lines(text: str) -> set[int]:
    """Returns the numbers of the lines of a source that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in SILENT for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def compare(allowed: Mapping[str, Mapping[str, int]], places: Places) -> list[str]:
    """Return a sentence for each figure that is worse than it may be."""
    complaints = []
    for figure, keys in places.items():
        for key, entries in keys.items():
            limit = allowed.get(figure, {}).get(key, NEWCOMERS.get(figure, 0))
            if len(entries) > limit:
                complaints.append(
                    f"{figure}, {key}: {len(entries)}, at most {limit} (tools/ratchets.py --list {figure!r})"
                )
    return complaints


def lowered(allowed: Mapping[str, Mapping[str, int]], places: Places) -> dict[str, dict[str, int]]:
    """Return the file's new content: no figure rises; figures and options that the file does not have are added."""
    data = {figure: dict(keys) for figure, keys in allowed.items()}
    for figure, keys in places.items():
        limits = data.get(figure)
        data[figure] = {
            key: len(entries) if limits is None else min(limits.get(key, NEWCOMERS.get(figure, 0)), len(entries))
            for key, entries in keys.items()
            if entries and (limits is None or key in limits or figure in NEWCOMERS)
        }
    return data


def _numbered(circles: list[list[str]]) -> dict[str, list[str]]:
    return {"all": [" <-> ".join(circle) for circle in circles]}


def _save(data: Mapping[str, Mapping[str, int]]) -> None:
    DATA.write_text(json.dumps(data, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
