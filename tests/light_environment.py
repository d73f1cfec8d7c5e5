"""An environment with what `pip install tureen` brings, and no more: links to what is installed here."""

from __future__ import annotations

import importlib.metadata
import shutil
import sysconfig
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_path("purelib"))


def distributions() -> dict[str, importlib.metadata.Distribution]:
    """What pyproject.toml needs without extras, and what that needs, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted, chosen = [(Requirement(line), "") for line in project["dependencies"]], {}
    while wanted:
        requirement, extra = wanted.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        is_new = name not in chosen
        chosen[name] = importlib.metadata.distribution(name)
        needs = [Requirement(line) for line in chosen[name].requires or ()]
        wanted += [(need, asked) for asked in (*requirement.extras, *([""] if is_new else [])) for need in needs]
    return chosen


def make(folder: Path) -> Path:
    """Makes the environment in a folder. Returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    for distribution in distributions().values():
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                (site / name).symlink_to(SITE / name)
    ignored = shutil.ignore_patterns("__pycache__", "src")
    shutil.copytree(ROOT / "tureen", site / "tureen", ignore=ignored)
    for built in (SITE / "tureen" / "kernels" / "cpu").glob("_native*.so"):
        (site / "tureen" / "kernels" / "cpu" / built.name).symlink_to(built)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    return next(python.parent.parent.glob("lib/python3*/site-packages"))
