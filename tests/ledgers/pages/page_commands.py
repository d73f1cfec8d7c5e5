"""The commands of a block of code, for a server of a test."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from server_process import ServerProcess


def run(script: str, folder: Path, **env: str) -> str:
    """Run lines of a shell, in which `tureen` is this one. Return what they print."""
    done = completed(script, folder, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def completed(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The same; a script may fail."""
    bin_folder = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "no_proxy": "*", "NO_PROXY": "*"} | env
    return subprocess.run(["bash", "-ec", script], cwd=folder, env=env, capture_output=True, text=True, check=False)


def flags_of(block: str) -> list[str]:
    """The flags with which a block starts its server."""
    [line] = re.findall(r"^tureen serve(.*?)(?: &|  #.*)?$", block, re.MULTILINE)
    return shlex.split(line)


def commands(block: str, server: ServerProcess) -> list[str]:
    """Return the curl commands of a block for this server, each with the comment in the next line."""
    joined = block.replace("\\\n", " ").replace("http://127.0.0.1:30000", server.url)
    return re.findall(r"^curl .*(?:\n#.*)?", joined, re.MULTILINE)


def status_of(command: str, folder: Path) -> int:
    command = command.partition("\n")[0].partition("  #")[0].removeprefix("curl ").replace("-i ", "")
    return int(run(f"curl -s -o answer -w '%{{http_code}}' {command}", folder))


def check_statuses(block: str, server: ServerProcess, folder: Path) -> None:
    """Check that each command of a block is answered with the status in its comment, 200 where it has none."""
    for command in commands(block, server):
        said = re.search(r"# (\d{3})\b", command)
        assert status_of(command, folder) == (int(said[1]) if said else 200), command
