"""Wheels and source distributions, each made by the build system, hold what an installation needs."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

GUARDS = ("kernels", "CMakeLists.txt", "cmake/*", "pyproject.toml")

ROOT = Path(__file__).resolve().parents[3]


def _make_distribution(folder, what, **environment):
    pytest.importorskip("scikit_build_core")
    settings = {"build-dir": str(folder / "build")}
    code = f"from scikit_build_core import build; build.build_{what}({str(folder)!r}, {settings})"
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, env=os.environ | environment
    )
    (made,) = folder.glob("tureen-*")
    return made


def _files_of_package():
    """What the package consists of: everything in its folder that git does not ignore, but the kernels' sources."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "tureen"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return {name for name in names if (ROOT / name).exists() and not name.startswith("tureen/kernels/cpu/src/")}


def test_without_a_compiler_everything_else_is_installed(tmp_path):
    wheel = _make_distribution(tmp_path, "wheel", CXX=str(tmp_path / "no-compiler"))
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as members:
        assert {name for name in members.namelist() if name.startswith("tureen/")} == _files_of_package()


def test_sources_are_distributed_with_all_that_a_build_needs(tmp_path):
    archive = _make_distribution(tmp_path, "sdist")
    with tarfile.open(archive) as members:
        files = {name.partition("/")[2] for name in members.getnames()}
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tureen/kernels/cpu/src").rglob("*.*")}
    assert len(kernels) > 10
    assert files >= _files_of_package() | kernels | {
        "CMakeLists.txt",
        "cmake/isas.cmake",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
