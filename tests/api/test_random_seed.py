"""--random-seed: requests without a seed get the same ones in the same order at each start; their own seed wins."""

from __future__ import annotations

import contextlib

from app_under_test import App


def seeds(*own: int | None, **settings: int | None) -> list[int]:
    with contextlib.closing(App(**settings)) as app:
        answers = [
            app.generate(text="abc", sampling_params={"max_new_tokens": 1, "sampling_seed": seed}) for seed in own
        ]
        return [answer["meta_info"]["sampling_seed"] for answer in answers]


def test_the_same_setting_draws_the_same_seeds_in_the_same_order():
    first = seeds(None, None, None, random_seed=3)
    assert seeds(None, None, None, random_seed=3) == first
    assert len(set(first)) == 3
    assert seeds(None, None, None, random_seed=4) != first


def test_a_request_s_own_seed_wins_and_draws_none():
    drawn = seeds(None, None, random_seed=3)
    assert seeds(None, 7, None, random_seed=3) == [drawn[0], 7, drawn[1]]


def test_without_the_setting_seeds_differ_at_each_start():
    assert seeds(None) != seeds(None)
