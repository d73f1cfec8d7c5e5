"""`python -m tureen` = `tureen`."""

from __future__ import annotations

import sys

from tureen.cli import main

sys.exit(main())
