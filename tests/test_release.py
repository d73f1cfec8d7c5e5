"""`make release`: one version everywhere, a changelog from the fragments; and what the tools beside it say."""

from __future__ import annotations

import datetime
import importlib.util
import re
import shutil
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tureen

ROOT = Path(__file__).resolve().parents[1]
DAY = datetime.date(2030, 1, 2)


def _tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release, show_progress = _tool("release"), _tool("show_progress")


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tureen").mkdir()
    for name in ("pyproject.toml", "tureen/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\nNothing released yet. What is coming stands in `changes/`.\n"
    )
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("How to write them.\n")
    (tmp_path / "changes" / "b.md").write_text("Second.\n\nThird,\nin two lines.\n")
    (tmp_path / "changes" / "a.md").write_text("First.\n")
    return tmp_path


def test_both_places_name_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tureen.__version__


def test_a_release_writes_its_version_and_its_changes_and_removes_the_fragments(tree):
    release.prepare(tree, "1.2.0", DAY)
    assert tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"] == "1.2.0"
    assert '\n__version__ = "1.2.0"\n' in (tree / "tureen" / "__init__.py").read_text()
    section = "## 1.2.0 (2030-01-02)\n\n- First.\n- Second.\n- Third,\n  in two lines.\n"
    assert (tree / "CHANGELOG.md").read_text() == f"# Changelog\n\n{section}"
    assert [path.name for path in (tree / "changes").iterdir()] == ["README.md"]


def test_a_later_release_stands_above_the_earlier(tree):
    release.prepare(tree, "1.2.0", DAY)
    (tree / "changes" / "c.md").write_text("Fourth.\n")
    release.prepare(tree, "1.3.0", DAY)
    assert re.findall(r"^## (\S+)|^- (\w+)", (tree / "CHANGELOG.md").read_text(), re.MULTILINE) == [
        ("1.3.0", ""), ("", "Fourth"), ("1.2.0", ""), ("", "First"), ("", "Second"), ("", "Third"),
    ]  # fmt: skip


def test_a_version_that_is_not_later_is_refused(tree):
    release.prepare(tree, "1.2.0", DAY)
    (tree / "changes" / "c.md").write_text("Fourth.\n")
    for version in ("1.2.0", "1.1.9", "0.9.0"):
        with pytest.raises(SystemExit, match=r"not later than 1\.2\.0"):
            release.prepare(tree, version, DAY)


def test_a_release_without_news_is_refused(tree):
    for path in (tree / "changes").glob("?.md"):
        path.unlink()
    with pytest.raises(SystemExit, match="nothing is new"):
        release.prepare(tree, "1.2.0", DAY)


@pytest.mark.parametrize("arguments", [[], ["1.2"], ["v1.2.0"], ["1.2.0", "x"]])
def test_something_else_than_a_version_is_refused(arguments):
    with pytest.raises(SystemExit, match="three numbers"):
        release.main(arguments)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  [20/48] Building CXX object a.o\n", "compiling the kernels: 20 of 48"),
        ("  [21/48] Building CXX object a.o\n", ""),
        ("Collecting numpy>=1.26 (from tureen==0.1.0)\n", "Collecting numpy>=1.26"),
        ("  warning: something\n", ""),
    ],
)
def test_progress_is_read_from_what_pip_and_ninja_print(line, shown):
    assert show_progress.step(line) == shown


def test_the_development_environment_is_pinned_to_versions_that_fit():
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"], *chain(*extras.values())]
    needed = [each for each in map(Requirement, wanted) if each.name not in ("tureen", "av")]  # av is never installed
    wrong = [str(each) for each in needed if pinned.get(canonicalize_name(each.name), "-1") not in each.specifier]
    assert not wrong, "make lock"


def wanted(part: str) -> list[str]:
    """Requirements of tureen ("" = without extras), of an extra, or of its build."""
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if part == "build":
        return [*facts["build-system"]["requires"], "cmake", "ninja"]
    needed = facts["project"]["dependencies"]
    return [*needed, *facts["project"]["optional-dependencies"][part]] if part else needed


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("requirements-hashed.txt", ""),
        ("deploy/docker/requirements-cpu.txt", "vision"),
        ("deploy/docker/requirements-cuda.txt", "torch"),
        ("deploy/docker/requirements-build.txt", "build"),
    ],
)
def test_each_dependency_is_pinned_to_a_version_that_fits_and_by_hashes(file, part):
    text = (ROOT / file).read_text().replace("\\\n", " ")
    pinned = [line.partition(" --hash=sha256:")[::2] for line in text.splitlines() if line]
    assert all(re.fullmatch(r"[0-9a-f]{64}( +--hash=sha256:[0-9a-f]{64})*", hashes) for _, hashes in pinned)
    versions = {Requirement(line).name: str(Requirement(line).specifier).removeprefix("==") for line, _ in pinned}
    for line in wanted(part):
        needed = Requirement(line)
        assert versions[needed.name.lower().replace("_", "-")] in needed.specifier, f"{line}: make lock"


@pytest.mark.parametrize("image", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_installs_nothing_from_an_index_but_what_is_pinned_by_hash(image):
    """What builds the wheel is in the environment then: an isolated build would fetch the newest version of it."""
    text = (ROOT / "deploy" / "docker" / image).read_text().replace("\\\n", " ")
    calls = [" ".join(call.split()) for call in re.findall(r"pip (?:install|wheel)[^&\n]*", text)]
    files = [call.rpartition("/")[2] for call in calls if "--require-hashes" in call]
    others = [call for call in calls if "--require-hashes" not in call]
    assert files == [
        "requirements-build.txt",
        "requirements-cuda.txt" if "cuda" in image else "requirements-cpu.txt",
    ]
    assert len(others) == 2
    assert all("--no-deps" in call for call in others)
    assert "--no-build-isolation" in next(call for call in others if call.startswith("pip wheel"))
