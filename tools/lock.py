"""Writes requirements-hashed.txt: what tureen needs, in the versions installed here, with the hashes of their files.

    python tools/lock.py

The file holds for every Python and platform: `pip install --require-hashes -r requirements-hashed.txt`. Needs uv. Run
by `make lock` and by `make release`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "requirements-hashed.txt"
FLAGS = ("--quiet", "--universal", "--generate-hashes", "--no-header", "--no-annotate", "--python-version", "3.11")


def main() -> int:
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if uv is None:
        raise SystemExit("there is no uv here: pip install uv")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{line}\n" for line in installed()))
        constraints.flush()
        given = ("--constraint", constraints.name, "--output-file", str(TARGET), "pyproject.toml")
        return subprocess.run([uv, "pip", "compile", *FLAGS, *given], cwd=ROOT, check=False).returncode


def installed() -> list[str]:
    """Returns a requirement for each package that is installed here, of this version. Builds of their own are left
    out: no index has them."""
    found = importlib.metadata.distributions()
    return sorted(
        {f"{each.name}=={each.version}" for each in found if each.name != "tureen" and "+" not in each.version}
    )


if __name__ == "__main__":
    sys.exit(main())
