"""`python -m tureen` = `tureen`. Neither Ctrl-C while modules are imported nor a closed pipe ends in a traceback.

Imports: nothing.
Imported by: launch_server.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

CLOSED_PIPE = 141
"""The exit status of a program that SIGPIPE ends, as shells report it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, or those of the process. Returns the exit status."""
    try:
        status: int = importlib.import_module("tureen.cli.command_line").main(arguments)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError as error:  # `tureen … | head -1`, or a connection of a command
        status = CLOSED_PIPE if _drop_output() else 1
        if status == 1:
            print(f"tureen: {error.strerror}", file=sys.stderr)  # noqa: T201
    return status


def _drop_output() -> bool:
    """Discard output that no reader takes, so that Python's final flush does not fail. Return whether a reader left."""
    select = importlib.import_module("select")  # few commands need it
    is_closed = False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            is_closed = True
    return is_closed


if __name__ == "__main__":
    sys.exit(main())
