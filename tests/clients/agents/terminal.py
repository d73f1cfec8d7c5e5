"""Programs of this environment, run as in a terminal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parents[3] / "build" / "clients" / "agents"
PROGRAMS = (ENVIRONMENT / "node_modules" / ".bin", ENVIRONMENT / "bin")
PATIENCE_S = 600
NOTE = "The capital city of France is Paris."


def run(home: Path, *command: str) -> str:
    """Run a command in a folder that is also its home directory. Return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC", "CLAUDE"))}
    path = os.pathsep.join([*map(str, PROGRAMS), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=home,
        env=inherited | {"HOME": str(home), "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout


def run_shell(home: Path, script: str, *arguments: str) -> str:
    """Run a shell script of a page, its last command with more arguments."""
    return run(home, "bash", "-c", f'{script.rstrip()} "$@"', "bash", *arguments)
