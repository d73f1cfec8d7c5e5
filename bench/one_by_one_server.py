"""tureen without jump-forward, to compare with: `python bench/one_by_one_server.py --port 30001`, arguments as
`tureen serve`. What a grammar forces is drawn under its mask, token by token, like everything else.
"""

from __future__ import annotations

import sys

from tureen.cli.command_line import main
from tureen.engine.constraint import Constraint


def nothing(constraint: Constraint, left: int) -> list[int]:
    return []


if __name__ == "__main__":
    Constraint.forced = nothing  # type: ignore[method-assign, assignment]
    # The engine must run where the change is.
    sys.exit(main(["serve", "--engine", "thread", *sys.argv[1:]]))
