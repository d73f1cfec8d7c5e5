"""What is needed to build tureen, one requirement a line: what pyproject.toml says, and the programs that it runs. With
`--run`, what is needed to run it."""

import sys
import tomllib
from pathlib import Path

PROGRAMS = ["cmake>=3.24", "ninja"]

if __name__ == "__main__":
    pyproject = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    to_build = [*pyproject["build-system"]["requires"], *PROGRAMS]
    print(*(pyproject["project"]["dependencies"] if "--run" in sys.argv else to_build), sep="\n")
