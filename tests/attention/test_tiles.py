"""Stand-ins for attention that gives other bits for some numbers of queries."""

import torch

from tureen.attention.tiles import _agree

QUERIES = torch.arange(6, dtype=torch.float32).reshape(3, 2)


def by_place(x):
    return x + torch.arange(len(x))[:, None]


def test_two_ways_agree_where_they_give_the_same_bits():
    assert _agree(torch.clone, torch.clone, QUERIES, (1, 4))
    assert not _agree(torch.clone, lambda x: x + 1, QUERIES, (1, 4))


def test_a_way_that_cannot_be_repeated_agrees_with_none():
    assert not _agree(by_place, torch.clone, QUERIES, (4,))
    assert not _agree(torch.clone, by_place, QUERIES, (4,))
    assert not _agree(by_place, by_place, QUERIES, (4,))
