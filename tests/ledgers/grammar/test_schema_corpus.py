"""Every eighth real JSON schema is as the ledger says (tests/grammar/schema_corpus_ledger.json)."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "grammar"))
from real_schemas import corpus, ledger, told

GUARDS = ("grammar",)

EVERY = 8
PARTS = 6


@pytest.mark.parametrize("part", range(PARTS))
def test_every_eighth_schema_is_as_the_ledger_says(part):
    known = ledger()["not right"]
    names = list(corpus())[part * EVERY :: EVERY * PARTS]
    assert {name: told(name) for name in names} == {name: known.get(name, {}) for name in names}
