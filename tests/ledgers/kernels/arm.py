"""The kernels of 64-bit ARM, cross-compiled into a program that prints what they compute. It runs under qemu."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "aarch64"
OBJDUMP = "aarch64-linux-gnu-objdump"
EMULATOR = "qemu-aarch64-static"
TOOLS = ("aarch64-linux-gnu-g++", OBJDUMP, EMULATOR, "cmake", "ninja")


def build():
    """Returns the folder with `results` and its object files. Skips the test where a tool is missing."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        pytest.skip(f"no {', '.join(missing)}: apt-get install qemu-user-static g++-aarch64-linux-gnu")
    configure = ["cmake", "-S", str(ROOT / "tests/kernels/models"), "-B", str(BUILD), "-G", "Ninja"]
    configure += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={TOOLS[0]}"]
    configure += ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O2"]
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes build it
        for command in (configure, ["cmake", "--build", str(BUILD)]):
            environment = os.environ | {"PATH": path}
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
            assert run.returncode == 0, run.stdout.decode(errors="replace")
    return BUILD


def command(processor="max"):
    """Runs `results` as that processor would."""
    return [EMULATOR, "-cpu", processor, str(BUILD / "results")]
