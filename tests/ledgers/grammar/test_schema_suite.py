"""Every file of the JSON Schema Test Suite is as its ledger says (tests/grammar/json_schema_ledger.json)."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "grammar"))
from schema_suite import changed_without_strict, entry, ledger, suite, without_strict, wrongly_accepted

GUARDS = ("grammar",)


@pytest.mark.parametrize("name", suite())
def test_no_case_is_wrongly_accepted(name):
    assert wrongly_accepted(name) == []


@pytest.mark.parametrize("name", suite())
def test_without_strict_more_is_accepted_only_where_it_is_said(name):
    assert changed_without_strict(name) == []
    assert ledger()[name].get("without strict", {}) == without_strict(name)


@pytest.mark.parametrize("name", suite())
def test_every_case_is_as_the_ledger_says(name):
    assert entry(name) == ledger()[name], (
        "the result is better: rewrite the ledger with python tests/grammar/schema_suite.py"
    )
