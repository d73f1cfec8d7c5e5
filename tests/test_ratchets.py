"""tools/ratchets.py refuses what rose, and writes only downwards."""

import ast
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def ratchets(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import ratchets

    yield ratchets
    for name in ("ratchets", "import_rules", "prose"):
        sys.modules.pop(name, None)


PLACES = {"class names": {"Plan": ["a", "b", "c"], "Node": ["a", "b"]}}
LINES = {"api": 100}
PLACES_ALLOWED = {"class names": {"Plan": 3, "Node": 2}}


def test_a_figure_that_rose_is_named_with_its_limit(ratchets):
    allowed = {"class names": {"Plan": 2, "Node": 2}, "lines of code": {"api": 100}}
    (complaint,) = ratchets.compare(allowed, PLACES, LINES)
    assert complaint.startswith("class names, Plan: 3, at most 2")


def test_a_name_that_the_file_does_not_know_may_not_come(ratchets):
    (complaint,) = ratchets.compare({"class names": {"Plan": 3}, "lines of code": {"api": 100}}, PLACES, LINES)
    assert complaint.startswith("class names, Node: 2, at most 0")


def test_more_lines_need_a_named_feature_of_the_same_package(ratchets):
    allowed = {**PLACES_ALLOWED, "lines of code": {"api": 90}}
    assert "tureen/api: 100 lines of code, at most 90" in ratchets.compare(allowed, PLACES, LINES)[0]
    assert ratchets.compare({**allowed, "features": {"text: drafts": 10}}, PLACES, LINES)
    assert not ratchets.compare({**allowed, "features": {"api: drafts": 10}}, PLACES, LINES)


def test_written_figures_fall_and_never_rise(ratchets):
    allowed = {
        "class names": {"Plan": 2, "Node": 4, "Terms": 2},
        "lines of code": {"api": 130},
        "features": {"api: drafts": 10},
    }
    written = ratchets.lowered(allowed, PLACES, LINES)
    assert written["class names"] == {"Plan": 2, "Node": 2}
    assert written["lines of code"] == {"api": 90}, "with the feature's ten it may have the hundred that it has"


def test_written_lines_never_rise(ratchets):
    assert ratchets.lowered({**PLACES_ALLOWED, "lines of code": {"api": 70}}, PLACES, LINES)["lines of code"] == {
        "api": 70
    }


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('def f():\n    """Of the rows."""', 1),
        ('def f():\n    """The rows."""', 0),
        ('class A:\n    x = 1\n    """Where it stands."""', 1),
        ('def f():\n    """Often used."""', 0),
    ],
)
def test_a_docstring_that_begins_as_half_a_sentence_is_counted(ratchets, source, count):
    import prose

    assert len(list(prose.riddles(ast.parse(source)))) == count


def test_a_name_that_says_nothing_is_counted_once_for_each_value_it_gets(ratchets):
    import prose

    source = "def f(given):\n    found = one = 1\n    for made in found:\n        print(made, other)"
    assert sorted(name for _, name in prose.empty_names(ast.parse(source))) == ["found", "given", "made", "one"]


def test_a_function_whose_name_says_nothing_is_counted_too(ratchets):
    import prose

    source = "def wanted(): ...\nclass A:\n    async def one(self): ...\n    def others(self): ..."
    assert [name for _, name in prose.empty_names(ast.parse(source))] == ["wanted", "one"]


def test_worn_words_of_messages_and_pages_are_counted_and_docstrings_are_not(ratchets):
    import prose

    source = 'def f():\n    """Nobody reads it."""\n    raise ValueError(f"{1}: all but for one are told")'
    assert [word for _, word in prose.worn_messages(ast.parse(source))] == ["but for", "are told"]
    assert list(prose.worn_words("It tells\nsomebody anew.")) == [(2, "somebody"), (2, "anew")]


def test_lines_of_code_are_those_that_are_neither_blank_nor_comment_nor_docstring(ratchets):
    module = '"""A module.\n\nMore.\n"""\n\nx = 1  # a comment\n# another\n"""Of x."""\n'
    source = module + 'y = """two\nlines"""\nf(\n    x,\n)\n'
    assert ratchets.code_lines(source) == {6, 9, 10, 11, 12, 13}


def test_a_slower_gate_is_named_and_a_quicker_one_is_the_new_limit(ratchets):
    allowed = {"processor seconds of the gate": 900, "known flakes": 2}
    slower = {"processor seconds of the gate": 901, "known flakes": 1}
    assert ratchets.compare_suite(allowed, slower) == ["tests: processor seconds of the gate: 901, at most 900"]
    assert ratchets.lowered_suite(allowed, slower) == {"processor seconds of the gate": 900, "known flakes": 1}
