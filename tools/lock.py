"""Pin the installed versions: constraints.txt for development, requirements-hashed.txt for users.

    python tools/lock.py

`constraints.txt` lists every package of the development environment. A new release changes nothing until `make lock`
runs again. `requirements-hashed.txt` lists the dependencies of tureen with the hashes of their files, for every Python
and platform: `pip install --require-hashes -r requirements-hashed.txt`. In `deploy/docker`, `requirements-cpu.txt` has
those of the extra `vision`, too, `requirements-cuda.txt` those of `torch`, and `requirements-build.txt` what compiles
the kernels in an image. Needs uv. Run by `make lock` and by `make release`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HASHED = ROOT / "requirements-hashed.txt"
HASHED_CPU = ROOT / "deploy" / "docker" / "requirements-cpu.txt"
HASHED_CUDA = ROOT / "deploy" / "docker" / "requirements-cuda.txt"
HASHED_BUILD = ROOT / "deploy" / "docker" / "requirements-build.txt"
COMPILERS = ("cmake", "ninja")
"""scikit-build-core fetches these itself, but only for an isolated build."""
FLAGS = ("--quiet", "--universal", "--generate-hashes", "--no-header", "--no-annotate", "--python-version", "3.11")
HEAD = "# The development environment, written by `make lock`. To change a version, install it in .venv first.\n"


def main() -> int:
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if uv is None:
        raise SystemExit("there is no uv here: pip install uv")
    CONSTRAINTS.write_text(HEAD + "".join(f"{line}\n" for line in installed()), encoding="utf-8")
    wanted = {
        HASHED: ("pyproject.toml",),
        HASHED_CPU: ("--extra", "vision", "pyproject.toml"),
        HASHED_CUDA: ("--extra", "torch", "pyproject.toml"),
        HASHED_BUILD: ("-",),
    }
    builds = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    for file, what in wanted.items():
        given = ("--constraint", str(CONSTRAINTS), "--output-file", str(file), *what)
        typed = "\n".join((*builds, *COMPILERS)) if file == HASHED_BUILD else ""
        command = [uv, "pip", "compile", *FLAGS, *given]
        status = subprocess.run(command, cwd=ROOT, input=typed, text=True, check=False).returncode
        if status:
            return status
    return 0


def installed() -> list[str]:
    """Return `name==version` of each installed package, without the label of a local build."""
    found = importlib.metadata.distributions()
    pinned = {f"{each.name}=={each.version.partition('+')[0]}" for each in found if each.name not in ("pip", "tureen")}
    return sorted(pinned, key=str.lower)


if __name__ == "__main__":
    sys.exit(main())
