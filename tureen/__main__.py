"""`python -m tureen` = `tureen`.

Imports: cli.
Imported by: nothing.
"""

from __future__ import annotations

import sys

from tureen.cli import main

sys.exit(main())
