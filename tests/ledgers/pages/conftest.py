"""Servers that the ledgers of pages share, as those of tests/servers do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "servers"))

from shared_servers import seeing_server, server  # noqa: F401
