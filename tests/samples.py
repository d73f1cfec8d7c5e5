"""Samples: the gate runs some of many seeds or of a large product, and the ledgers run all.

A test that takes a sample has the mark `sampled`. `--every-case` gives it all cases, and leaves out the tests of the
gate that have no such mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest
from lanes import GATE, lane

T = TypeVar("T")

_is_whole = False


def pytest_configure(config: pytest.Config) -> None:
    global _is_whole
    _is_whole = config.getoption("every_case")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_whole:
        config.hook.pytest_deselected(items=[item for item in items if not _has_more(item)])
        items[:] = [item for item in items if _has_more(item)]


def _has_more(item: pytest.Item) -> bool:
    """Return whether a test runs with `--every-case`."""
    return lane(item.path) != GATE or item.get_closest_marker("sampled") is not None


def some(cases: Iterable[T], size: int) -> list[T]:
    """Return `size` of the cases at even distances, including the first and the last."""
    every = list(cases)
    if _is_whole or size >= len(every):
        return every
    if size == 1:
        return every[:1]
    return [every[round(place * (len(every) - 1) / (size - 1))] for place in range(size)]


def either(every: T, sampled: T) -> T:
    """Return the first with `--every-case`, and the second in the gate."""
    return every if _is_whole else sampled
