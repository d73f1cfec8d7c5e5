"""`python -m tureen` = `tureen`.

Imports: cli.
Imported by: nothing.
"""

from __future__ import annotations

import sys

from tureen.cli.command_line import main

sys.exit(main())
