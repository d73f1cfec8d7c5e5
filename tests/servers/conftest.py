"""Servers that the tests of this folder and of browser/ share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from shared_servers import seeing_server, server  # noqa: F401
