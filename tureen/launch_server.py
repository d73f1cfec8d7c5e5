"""`python -m tureen.launch_server …` = `tureen serve …`, so that replacing the module name in a command is enough.

Imports: __main__.
Imported by: nothing.
"""

from __future__ import annotations

import sys

from tureen.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
