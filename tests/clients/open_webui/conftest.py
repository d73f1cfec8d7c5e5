from __future__ import annotations

import pytest
from agent_server import OPTIONS


@pytest.fixture(scope="session")
def server_options() -> tuple[str, ...]:
    return OPTIONS
