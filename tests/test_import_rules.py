"""tools/import_rules.py finds every import that a package's docstring does not allow."""

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
SOURCES = {
    "__init__.py": "",
    "errors.py": '"""Errors.\n\nImports: nothing.\nImported by: all.\n"""',
    "cache/__init__.py": '"""Pages.\n\nImports: errors; msgspec.\nImported by: engine.\n"""',
    "cache/pages.py": "import msgspec\nfrom tureen.errors import A",
    "engine/__init__.py": '"""Steps.\n\nImports: cache.\nImported by: nothing.\nIndependent: fast, slow.\n"""',
    "engine/fast.py": "from tureen.cache import pages",
    "engine/slow.py": "from tureen.cache.pages import Page",
}


@pytest.fixture
def breaches(monkeypatch, tmp_path):
    """Returns a function: what the tool says of a package of these files, some of them replaced."""
    monkeypatch.syspath_prepend(TOOLS)
    import import_rules

    monkeypatch.setattr(import_rules, "ROOT", tmp_path)

    def check(replaced=None):
        for name, source in (SOURCES | (replaced or {})).items():
            path = tmp_path / "tureen" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        return import_rules.check(import_rules.read_modules())

    yield check
    sys.modules.pop("import_rules", None)


def test_a_package_that_keeps_to_its_docstrings_has_no_breach(breaches):
    assert breaches() == []


def test_an_import_needs_the_word_of_both_ends(breaches):
    first, second = breaches(
        {"engine/fast.py": "from tureen.cache import pages\nfrom tureen.errors import A\nimport torch"}
    )
    assert first == "tureen/engine/fast.py imports errors: the docstring of engine does not say so"
    assert second == "tureen/engine/fast.py imports torch: the docstring of engine does not say so"


def test_imports_inside_functions_and_for_type_checking_count(breaches):
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tureen.engine import fast"
    assert "tureen/cache/pages.py imports engine: the docstring of cache does not say so" in breaches(
        {"cache/pages.py": f"import msgspec\nimport tureen.errors\n{source}"}
    )
    assert any("imports torch" in breach for breach in breaches({"engine/fast.py": "def f():\n    import torch"}))


def test_a_permission_that_nobody_uses_is_left_over(breaches):
    assert breaches({"cache/pages.py": "import tureen.errors"}) == [
        "the docstring of cache says `Imports: msgspec`, which is no longer so"
    ]


@pytest.mark.parametrize(
    ("graph", "circles"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_circles_are_the_sets_of_modules_that_reach_each_other(monkeypatch, graph, circles):
    monkeypatch.syspath_prepend(TOOLS)
    from import_rules import cycles

    assert cycles(graph) == circles


def test_independent_modules_do_not_import_each_other(breaches):
    assert breaches({"engine/slow.py": "from tureen.cache import pages\nfrom tureen.engine import fast"}) == [
        "tureen/engine/slow.py imports engine.fast: they are to be independent"
    ]


def test_independent_folders_do_not_import_each_other(breaches):
    sources = {
        "engine/__init__.py": '"""Steps.\n\nImports: cache.\nImported by: nothing.\nIndependent: folders.\n"""',
        "engine/left/__init__.py": "",
        "engine/left/own.py": "",
        "engine/left/hand.py": "from tureen.engine import fast\nfrom tureen.engine.left import own",
        "engine/right/__init__.py": "",
        "engine/right/hand.py": "",
    }
    assert breaches(sources) == []
    assert breaches(sources | {"engine/right/hand.py": "from tureen.engine.left import own"}) == [
        "tureen/engine/right/hand.py imports engine.left.own: the folders of engine are to be independent"
    ]


def test_a_package_without_the_lines_is_named(breaches):
    (breach,) = breaches({"lora/__init__.py": '"""Adapters."""'})
    assert breach.startswith("tureen/lora/__init__.py: its docstring has no line")
