"""Coverage of the parts that keep the books, each by the tests that are about it.

Exit status 1 where it is below 95 % of the lines or of the branches of a part, or one of its tests fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

GOAL = 95.0
PARTS = {
    "scheduler": (
        ["engine/scheduler.py", "engine/queue.py"],
        [
            "tests/engine/test_scheduler.py",
            "tests/engine/test_fairness.py",
            "tests/engine/test_golden_schedule.py",
            "tests/engine/test_control.py",
        ],
    ),
    "cache": (["cache/manager.py", "cache/pages.py"], ["tests/cache"]),
    "radix": (["cache/radix.py"], ["tests/cache"]),
    "stop strings": (["text/stops.py"], ["tests/text/test_detokenizer.py"]),
    "detokenizer": (["text/detokenizer.py"], ["tests/text/test_detokenizer.py"]),
    "sampler": (
        ["sampling/sampler.py", "sampling/random.py", "sampling/filtered.py"],
        [
            "tests/sampling/test_sampler.py",
            "tests/sampling/test_random.py",
            "tests/sampling/test_logprobs.py",
            "tests/sampling/test_grammar_mask.py",
        ],
    ),
    "quotas": (["clients/quotas.py"], ["tests/api/test_quotas.py"]),
    "recordings": (
        ["recordings/recording.py", "recordings/delta_log.py", "http/replay.py"],
        ["tests/api/test_replay.py", "tests/api/test_recording.py", "tests/api/test_track.py"],
    ),
    "HTTP front": (
        ["http/middleware.py", "http/connection.py", "http/head.py", "http/sse.py", "http/listener.py"],
        [
            "tests/servers/test_connections.py",
            "tests/api/test_http_limits.py",
            "tests/api/test_http_messages.py",
            "tests/servers/test_http_sockets.py",
            "tests/api/test_http_time.py",
            "tests/servers/test_listener.py",
            "tests/api/test_access.py",
            "tests/servers/test_tls_reload.py",
            "tests/api/test_streaming.py",
            "tests/api/test_bad_requests.py",
        ],
    ),
}
"""Files, and where their tests are."""


def main(names: list[str]) -> int:
    """Prints a line a part."""
    is_low = False
    for name in names or PARTS:
        files, tests = PARTS[name]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            include = ",".join(f"tureen/{path}" for path in files)
            pytest = ["-m", "pytest", "-q", *tests]
            status = run(["run", f"--data-file={folder}/data", "--branch", f"--include={include}", *pytest])
            run(["json", f"--data-file={folder}/data", "-q", "-o", str(report)])
            measured = json.loads(report.read_text())
        totals = measured["totals"]
        lines = 100 * totals["covered_lines"] / totals["num_statements"]
        branches = 100 * totals["covered_branches"] / totals["num_branches"]
        is_low = is_low or min(lines, branches) < GOAL or status != 0
        failed = "" if status == 0 else ", and a test fails"
        print(f"{name:14} lines {lines:5.1f} %, branches {branches:5.1f} %{failed}", flush=True)
        for path, missing in measured["files"].items():
            if missing["missing_lines"] or missing["missing_branches"]:
                print(f"    {path}: lines {missing['missing_lines']}, branches {missing['missing_branches']}")
    return int(is_low)


def run(args: list[str]) -> int:
    """The status of a command of coverage.py."""
    return subprocess.run([sys.executable, "-m", "coverage", *args], stdout=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
