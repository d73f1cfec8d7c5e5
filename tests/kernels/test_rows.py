"""Stand-ins for a library: they give other results for some numbers of rows, at some places, or at every call."""

import logging

import pytest
import torch

from tureen.kernels import rows
from tureen.kernels.rows import SIZES, agreeing_sizes, by_pieces

THREE = torch.arange(6, dtype=torch.float32).reshape(3, 2)


def by_number(x):
    """Other bits for one row, and from 256 on."""
    return x + (0 if 1 < len(x) < 256 else 1)


def by_place(x):
    """Other bits for the last row, if there are several."""
    x = x.clone()
    x[1:][-1:] += 1
    return x


@pytest.fixture(autouse=True)
def nothing_said():
    rows.say_that_nothing_is_promised.cache_clear()
    yield
    rows.say_that_nothing_is_promised.cache_clear()


def test_the_largest_set_of_sizes_that_agree_is_taken():
    assert agreeing_sizes(torch.clone, THREE, SIZES) == SIZES
    assert agreeing_sizes(by_number, THREE, SIZES) == (2, 4, 8, 16, 32, 64, 128)
    assert agreeing_sizes(lambda x: x + len(x), THREE, (1, 2, 4)) == (4,)


def test_sizes_in_which_a_row_s_place_matters_are_not_taken():
    assert agreeing_sizes(by_place, THREE, SIZES) == (1,)


@pytest.mark.parametrize("step", [3, 4, 7])
def test_every_row_is_tried_at_every_place(step):
    def at_some_places(x):
        return x + (torch.arange(len(x)) % step == step - 1)[:, None]

    assert agreeing_sizes(at_some_places, THREE, (1, 2, 3, 4, 6, 8, 12, 16)) == tuple(
        size for size in (1, 2, 3, 4, 6, 8, 12, 16) if size < step
    )


def test_where_nothing_can_be_repeated_the_operator_is_told_once(caplog):
    with caplog.at_level(logging.WARNING, "tureen"):
        for _ in range(2):
            assert agreeing_sizes(lambda x: torch.rand_like(x), THREE, SIZES) == ()
    assert [
        record.message for record in caplog.records if "other tokens when it runs with other requests" in record.message
    ]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("sizes", [(), (1,), (4,), (1, 2, 4, 8, 16), (2, 8, 256), SIZES])
def test_pieces_give_every_row_once_and_nothing_else(sizes):
    for number in (0, 2, 3, 5, 17, 31, 100, 257, 300, 1000):
        x = torch.randn(number, 5)
        seen = []

        def function(part, seen=seen):
            seen.append(len(part))
            return part * 2

        assert torch.equal(by_pieces(function, x, sizes), x * 2)
        assert not sizes or not number or set(seen) <= set(sizes)
        assert not sizes or sum(seen) <= 4 * number


def test_what_depends_on_the_number_of_rows_does_so_no_more_in_pieces():
    sizes = agreeing_sizes(by_number, THREE, SIZES)
    x = torch.randn(600, 2)
    for number in (1, 2, 3, 100, 256, 300, 599, 600):
        assert torch.equal(by_pieces(by_number, x[:number], sizes), x[:number])
