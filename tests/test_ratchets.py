"""tools/ratchets.py refuses what rose, and writes only downwards."""

import ast
import sys
from pathlib import Path

import pytest

from tureen.contract.params import SamplingParams
from tureen.requests.drafts import Options

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def ratchets(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import ratchets

    yield ratchets
    for name in ("ratchets", "import_rules", "prose"):
        sys.modules.pop(name, None)


PLACES = {"footprint": {"min_p": ["a", "b", "c"], "explain": ["a", "b"]}}


def test_a_figure_that_rose_is_named_with_its_limit(ratchets):
    (complaint,) = ratchets.compare({"footprint": {"min_p": 2, "explain": 2}}, PLACES)
    assert complaint.startswith("footprint, min_p: 3, at most 2")


def test_a_key_that_the_file_does_not_have_yet_may_not_come(ratchets):
    (complaint,) = ratchets.compare({}, {"import cycles": {"all": ["a <-> b"]}})
    assert complaint.startswith("import cycles, all: 1, at most 0")


def test_a_new_option_may_be_in_four_modules(ratchets):
    allowed = {"footprint": {"min_p": 3}}
    assert not ratchets.compare(allowed, {"footprint": {"explain": ["a", "b", "c", "d"]}})
    (complaint,) = ratchets.compare(allowed, {"footprint": {"explain": ["a", "b", "c", "d", "e"]}})
    assert complaint.startswith("footprint, explain: 5, at most 4")


def test_written_figures_fall_and_never_rise(ratchets):
    allowed = {"footprint": {"min_p": 2, "gone": 2}, "import cycles": {}}
    found = {**PLACES, "import cycles": {"all": ["a <-> b"]}}
    written = ratchets.lowered(allowed, found)
    assert written == {"footprint": {"min_p": 2, "explain": 2}, "import cycles": {}}
    assert ratchets.lowered({}, PLACES) == {"footprint": {"min_p": 3, "explain": 2}}


def test_footprints_are_of_every_option_that_a_request_has(ratchets):
    names = set(ratchets.options())
    fields = {*SamplingParams.__struct_fields__, *Options.__struct_fields__}
    assert names == fields - ratchets.EVERYDAY
    assert fields > ratchets.EVERYDAY


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
