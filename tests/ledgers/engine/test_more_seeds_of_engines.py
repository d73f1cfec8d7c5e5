"""Resumed requests and guesses: more random requests than in tests/engine."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "engine"))
from test_fairness import WEIGHTS, check_bound
from test_guarded_outputs import PARTS, check_part
from test_guesses import PAGE_SIZES, RIGHT, check_guesses
from test_resumed import check_resumed

GUARDS = ("engine", "cache", "contract")


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 2**32))
def test_more_requests_go_on_from_every_delta(seed):
    check_resumed(seed)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("seed", range(20))
def test_more_guesses_right_or_wrong_change_no_answer(page_size, right, seed):
    check_guesses(page_size, right, seed)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_more_clients_are_served_alike_within_the_bound_of_the_paper(seed, weights):
    check_bound(seed, weights)


@pytest.mark.parametrize("part", range(PARTS))
def test_more_random_guards_and_random_limits_make_valid_json(part):
    check_part(part)
