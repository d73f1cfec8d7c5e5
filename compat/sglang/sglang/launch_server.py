"""`python -m sglang.launch_server …` = `tureen serve …`."""

import sys

from tureen.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
