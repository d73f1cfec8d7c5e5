"""Tools of a release that start other programs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("wheels_tool", ROOT / "tools" / "wheels.py")
wheels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wheels)


def test_wheels_are_for_interpreters_that_can_build_and_a_failure_shows_what_was_printed():
    wheels_are_for_interpreters_that_can_build()
    a_failure_shows_all_that_was_printed_and_its_status()


def wheels_are_for_interpreters_that_can_build():
    found = wheels.find_pythons()
    assert all(tuple(map(int, version.split("."))) >= (3, 11) for version in found)
    for version, program in found.items():
        ran = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        assert ran.stdout.startswith(f"Python {version}.")


def a_failure_shows_all_that_was_printed_and_its_status():
    code = "import sys; print('the reason'); sys.exit(3)"
    command = [sys.executable, str(ROOT / "tools" / "show_progress.py"), sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (3, "the reason")
