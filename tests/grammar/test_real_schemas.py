"""Some real JSON schemas are as their ledger says; tests/ledgers/grammar looks at more of them."""

from real_schemas import corpus, ledger, told

EVERY = 256


def test_every_256th_schema_is_as_the_ledger_says():
    known = ledger()["not right"]
    names = list(corpus())[::EVERY]
    assert {name: told(name) for name in names} == {name: known.get(name, {}) for name in names}


def test_the_ledger_is_about_the_whole_corpus_and_holds_what_is_promised():
    sums = ledger()["sums"]
    assert sums["schemas"] == len(corpus()) >= 1_500
    assert sums["compiled"] >= 0.97 * sums["schemas"]
    assert sums["over-constrained"] <= 0.01 * sums["schemas"]
    assert sums["under-constrained"] == 0
