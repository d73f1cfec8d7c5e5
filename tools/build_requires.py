"""What is needed to build tureen, one requirement a line: what pyproject.toml says, and the programs that it runs."""

import tomllib
from pathlib import Path

PROGRAMS = ["cmake>=3.24", "ninja"]

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    print(*project["build-system"]["requires"], *PROGRAMS, sep="\n")
