"""Branch coverage of the parts that keep the books, each by the tests that are about it; the goal is 95 %."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

GOAL = 95.0
PARTS = {
    "scheduler": (["engine/scheduler.py", "engine/queue.py", "engine/fairness.py"], ["tests/engine"]),
    "cache": (["cache/manager.py", "cache/pages.py"], ["tests/cache", "tests/engine"]),
    "radix": (["cache/radix.py"], ["tests/cache", "tests/engine"]),
    "stop strings": (["text/stops.py"], ["tests/text/test_detokenizer.py", "tests/api/test_generate.py"]),
    "detokenizer": (["text/detokenizer.py"], ["tests/text/test_detokenizer.py"]),
    "sampler": (["sampling/sampler.py", "sampling/random.py", "sampling/filtered.py"], ["tests/sampling"]),
    "quotas": (["requests/quotas.py"], ["tests/api/test_quotas.py", "tests/api/test_metered_tokens.py"]),
    "recordings": (
        ["requests/recording.py", "requests/track.py", "http/replay.py"],
        ["tests/api/test_replay.py", "tests/api/test_track.py"],
    ),
    "HTTP front": (
        ["http/middleware.py", "http/connection.py", "http/sse.py", "http/listener.py"],
        [
            "tests/api/test_connections.py",
            "tests/api/test_access.py",
            "tests/api/test_streaming.py",
            "tests/api/test_bad_requests.py",
        ],
    ),
}
"""Files, and where their tests are."""


def main(names: list[str]) -> int:
    """Prints a line a part. Exit status 1 where one is below the goal."""
    is_low = False
    for name in names or PARTS:
        files, tests = PARTS[name]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            include = ",".join(f"tureen/{one}" for one in files)
            there = [one for one in tests if Path(one).exists()]
            run(["run", f"--data-file={folder}/data", "--branch", f"--include={include}", "-m", "pytest", "-q", *there])
            run(["json", f"--data-file={folder}/data", "-q", "-o", str(report)])
            found = json.loads(report.read_text())
        percent = found["totals"]["percent_covered"]
        is_low = is_low or percent < GOAL
        print(f"{name:14} {percent:6.1f} %", flush=True)
        for path, one in found["files"].items():
            if one["missing_lines"] or one["missing_branches"]:
                print(f"    {path}: lines {one['missing_lines']}, branches {one['missing_branches']}")
    return int(is_low)


def run(args: list[str]) -> None:
    """One command of coverage.py, which may tell of failed tests on stderr and goes on."""
    subprocess.run([sys.executable, "-m", "coverage", *args], stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
