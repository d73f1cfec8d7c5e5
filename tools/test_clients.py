"""Runs clients of other projects against a real server: `make test-clients ARGS='crewai node --record'`.

Each folder of tests/clients with a `requirements.txt` is an environment of its own, as clients disagree about versions
of what they share. An argument that names such a folder chooses it; all others are pytest's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS, BUILT = ROOT / "tests" / "clients", ROOT / "build" / "clients"
NO_TESTS_COLLECTED = 5


def main() -> int:
    folders = {file.parent.name: file.parent for file in sorted(CHECKS.glob("*/requirements.txt"))}
    chosen = [name for name in sys.argv[1:] if name in folders] or list(folders)
    options = [argument for argument in sys.argv[1:] if argument not in folders]
    failed = [name for name in chosen if not _passes(folders[name], options)]
    print(f"test-clients: {'failed: ' + ', '.join(failed) if failed else 'all good'}")
    return 1 if failed else 0


def _passes(folder: Path, options: list[str]) -> bool:
    print(f"== {folder.name}", flush=True)
    python = _install(folder)
    command = [str(python), "-m", "pytest", "--config-file", str(CHECKS / "pytest.ini"), str(folder), *options]
    return subprocess.run(command, cwd=ROOT, check=False).returncode in (0, NO_TESTS_COLLECTED)


def _install(folder: Path) -> Path:
    """Returns the Python of the folder's environment, which has the newest versions of what the folder requires."""
    environment = BUILT / folder.name
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    overrides = folder / "overrides.txt"  # for instance without a large package that is of no use to the checks
    chosen = ["--override", str(overrides)] if overrides.exists() else []
    subprocess.run([*install, "--upgrade", "--requirement", str(folder / "requirements.txt"), *chosen], check=True)
    without = folder / "requirements-without-dependencies.txt"
    if without.exists():
        subprocess.run([*install, "--no-deps", "--requirement", str(without)], check=True)
    if (folder / "package.json").exists():
        modules = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(environment)]
        subprocess.run([*modules, *_packages(folder)], check=True)
    return python


def _packages(folder: Path) -> list[str]:
    return list(json.loads((folder / "package.json").read_text(encoding="utf-8"))["dependencies"])


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
