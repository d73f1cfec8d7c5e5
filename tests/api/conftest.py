"""One application for each module whose tests leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from app_under_test import App


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App() as running:
        yield running
