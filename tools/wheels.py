"""Builds wheels into dist/, one for each Python found, with the kernels of all instruction sets, and tests each.

    python tools/wheels.py [VERSION …]     # 3.11 3.13; none: every one that is found

Each is tagged by auditwheel, then installed in an empty environment without a
compiler, where a server must answer: tests/first_run/first_run.py. Run by `make wheel`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
OLDEST = (3, 11)
QUESTION = "import sys, sysconfig, venv, ensurepip; print(*sys.version_info[:2], sysconfig.get_path('include'))"


def main(versions: list[str]) -> int:
    DIST.mkdir(exist_ok=True)
    pythons = find_pythons()
    wanted = versions or list(pythons)
    faults = [f"there is no Python {version} here" for version in wanted if version not in pythons]
    for version in wanted:
        if version in pythons:
            print(f"Python {version}: {pythons[version]}", flush=True)
            wheel = build(pythons[version])
            print(f"  {wheel.relative_to(ROOT)}  {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
            command = [
                sys.executable,
                str(ROOT / "tests/first_run/first_run.py"),
                str(wheel),
                "--python",
                pythons[version],
            ]
            if subprocess.run(command, check=False).returncode:
                faults.append(f"the wheel for Python {version} failed its first run")
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


def find_pythons() -> dict[str, str]:
    """Returns the interpreters that can build: version -> program, of PATH and of pyenv, the oldest version first."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted(Path.home().glob(".pyenv/versions/3.*/bin"))
    programs: dict[tuple[int, int], str] = {}
    for folder in folders:
        for program in sorted(folder.glob("python3.*")):
            if re.fullmatch(r"python3\.\d+", program.name) and "shims" not in program.parts:
                version = version_of(program)
                if version >= OLDEST:
                    programs.setdefault(version, str(program))
    return {f"{major}.{minor}": programs[major, minor] for major, minor in sorted(programs)}


def version_of(program: Path) -> tuple[int, int]:
    """Returns (0, 0) for an interpreter that cannot build: no venv, no headers."""
    ran = subprocess.run([str(program), "-I", "-c", QUESTION], capture_output=True, text=True, check=False)
    if ran.returncode:
        return 0, 0
    major, minor, include = ran.stdout.split(maxsplit=2)
    return (int(major), int(minor)) if Path(include.strip(), "Python.h").is_file() else (0, 0)


def build(python: str) -> Path:
    """Builds and tags a wheel. Returns its path in dist/."""
    with tempfile.TemporaryDirectory(prefix="tureen-wheel-") as folder:
        run([python, "-m", "venv", f"{folder}/venv"])
        run(
            [
                f"{folder}/venv/bin/pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--wheel-dir",
                f"{folder}/raw",
                str(ROOT),
            ]
        )
        (raw,) = Path(folder, "raw").glob("*.whl")
        if raw.name.endswith("-none-any.whl"):
            raise SystemExit("the kernels could not be built: pip install -v . shows why")
        if sys.platform == "linux":
            path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
            command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", f"{folder}/tagged", str(raw)]
            run(command, env=os.environ | {"PATH": path})
            (raw,) = Path(folder, "tagged").glob("*.whl")
        return Path(shutil.copy(raw, DIST))


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
