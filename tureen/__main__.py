"""`python -m tureen` = `tureen`. Ctrl-C while the command's modules are imported ends it without a traceback too.

Imports: nothing.
Imported by: launch_server.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, or those of the process. Returns the exit status."""
    try:
        status: int = importlib.import_module("tureen.cli.command_line").main(arguments)
    except KeyboardInterrupt:
        status = 130
    return status


if __name__ == "__main__":
    sys.exit(main())
