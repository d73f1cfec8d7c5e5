"""The entry point of every child process: `python -P -m tureen.sandbox.child_main PARENT PROGRAM ARGUMENT…`.

child_process.py starts it. PARENT is the process id of the starting process. PROGRAM is a module, or the absolute path
of a file.
"""

from __future__ import annotations

import os
import runpy
import sys

from tureen.sandbox.limits import die_with_parent


def main() -> None:
    """Tie the life of this process to its parent's, then run the program as `__main__`."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    del sys.argv[:2]
    if os.path.isabs(program):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
