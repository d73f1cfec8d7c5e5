"""Runs pytest in several environments, two runs at a time. Each run is one process, so it loads its modules once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
AT_A_TIME = 2


class Run(NamedTuple):
    name: str
    tests: tuple[str, ...]
    environment: Mapping[str, str]  # besides that of this process
    options: tuple[str, ...] = ()


def failures(tool: str, runs: Iterable[Run], arguments: list[str]) -> list[str]:
    """Start pytest for each run, and print its output when it has ended.

    tool: the prefix of each printed heading. arguments: further arguments for pytest.
    Return the names of the runs that failed.
    """
    runs = tuple(runs)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        started = [threads.submit(_result, run, arguments) for run in runs]
        failed = []
        for run, result in zip(runs, started, strict=True):
            status, output = result.result()
            print(f"{tool}: {run.name}\n{output}", end="", flush=True)
            if status:
                failed.append(run.name)
    return failed


def _result(run: Run, arguments: list[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "--numprocesses", "0", *run.tests, *run.options, *arguments]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | run.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return ended.returncode, ended.stdout
