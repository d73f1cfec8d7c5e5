"""The diffs on the pages that say how something is added, and a copy of the package to apply them to."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import tureen.kernels.cpu as kernels

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_THE_EDITABLE_ONE = """
import sys

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""


def diff_of(page: str) -> str:
    [diff] = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M | re.DOTALL)
    return str(diff)


def apply_diff(page: str, folder: Path) -> None:
    """Changes the files under a folder as the diff of a page of docs/ says."""
    diff = diff_of(page)
    command = ["git", "-C", str(folder), "apply", "--whitespace=error", "-"]
    done = subprocess.run(command, input=diff, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"docs/{page}: {done.stderr}"


def copy_repository(folder: Path) -> dict[str, str]:
    """Copies package, tests, tools and pages. Returns the environment in which a Python imports that package."""
    for name in ("tureen", "tests", "tools", "docs", "deploy", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for place in kernels.__path__:
        for built in Path(place).glob("_native*.so"):
            (folder / "tureen" / "kernels" / "cpu" / built.name).symlink_to(built)
    (folder / "sitecustomize.py").write_text(WITHOUT_THE_EDITABLE_ONE, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}
