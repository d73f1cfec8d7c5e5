"""Some files of the JSON Schema Test Suite are as its ledger says; tests/ledgers/grammar looks at all of them."""

from pathlib import Path

import pytest
from schema_suite import ELSEWHERE, changed_without_strict, entry, ledger, suite, wrongly_accepted

EVERY = 8


@pytest.mark.parametrize("name", list(suite())[::EVERY])
def test_every_case_of_some_files_is_as_the_ledger_says(name):
    assert wrongly_accepted(name) == []
    assert changed_without_strict(name) == []
    assert entry(name) == ledger()[name], (
        "the result is better: rewrite the ledger with python tests/grammar/schema_suite.py"
    )


def test_the_ledger_is_about_the_whole_suite():
    assert list(ledger()) == list(suite())
    assert sum(len(group["tests"]) for groups in suite().values() for group in groups) == 4892


def test_at_least_95_percent_of_the_cases_about_values_and_combinators_are_right():
    told = [entry for name, entry in ledger().items() if Path(name).stem not in ELSEWHERE]
    for right in ("right", "right without keys that the schema does not speak of"):
        assert sum(entry.get(right, entry["right"]) for entry in told) >= 0.95 * sum(entry["cases"] for entry in told)
