"""Tests beside busy loops: what passes on a quiet machine passes on one that has no time.

Arguments go to pytest; without any, what depends on time most is run: limits, watchdogs, processes that are waited for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_LOOPS = 8
TIMED: tuple[str, ...] = (
    "tests/servers/test_connections.py",
    "tests/api/test_generate.py",
    "tests/api/test_media_fields.py",
    "tests/api/test_pause.py",
    "tests/api/test_recorded_clients.py",
    "tests/ledgers/api/test_schema_fuzz.py",
    "tests/api/test_weight_routes.py",
    "tests/bench",
    "tests/grammar_service/test_compiler.py",
    "tests/grammar_service/test_final_check.py",
    "tests/kernels/cpu/test_pool.py",
    "tests/media",
    "tests/sampling/test_custom_isolation.py",
    "tests/sampling/test_custom_processors.py",
    "tests/serving",
)


def main() -> int:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_LOOPS)]
    try:
        command = [sys.executable, "-m", "pytest", *(sys.argv[1:] or TIMED)]
        return subprocess.run(command, cwd=ROOT).returncode
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
