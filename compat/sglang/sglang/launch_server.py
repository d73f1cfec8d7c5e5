"""`python -m sglang.launch_server …` = `tureen serve …`."""

import sys

from tureen.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
