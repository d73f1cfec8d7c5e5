"""`python -m sglang.launch_server …` = `python -m tureen.launch_server …`."""

from __future__ import annotations

import sys

from tureen.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
