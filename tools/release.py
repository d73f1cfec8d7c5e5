"""Makes a release: the version, CHANGELOG.md from changes/, a commit and a tag, sources and tested wheels in dist/.

    python tools/release.py 1.2.0

Nothing leaves this machine: the last lines say how to publish what was made. docs/releases.md says what a version
promises. Run by `make release VERSION=1.2.0`.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+")
PLACES = {"pyproject.toml": r'(?m)^version = "([^"]*)"$', "tureen/__init__.py": r'(?m)^__version__ = "([^"]*)"$'}
"""Files that name the version -> where."""
README = "README.md"
HASHED, CONSTRAINTS = "requirements-hashed.txt", "constraints.txt"
"""Files of tools/lock.py."""
NOTHING_YET = "Nothing released yet. What is coming stands in `changes/`.\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not VERSION.fullmatch(arguments[0]):
        raise SystemExit("make release VERSION=1.2.0: three numbers")
    version = arguments[0]
    if run("git", "status", "--porcelain"):
        raise SystemExit("commit or put away first what git status shows")
    paths = prepare(ROOT, version, datetime.date.today())
    if subprocess.run([sys.executable, str(ROOT / "tools" / "lock.py")], cwd=ROOT, check=False).returncode:
        raise SystemExit("the dependencies could not be pinned. To begin again: git reset --hard")
    paths += [ROOT / HASHED, ROOT / CONSTRAINTS, *(ROOT / "deploy" / "docker").glob("requirements-*.txt")]
    run("git", "add", "--all", "--", *map(str, paths))
    run("git", "commit", "--quiet", "--message", f"Release {version}")
    run("git", "tag", f"v{version}")
    run(sys.executable, "-c", "from scikit_build_core import build; build.build_sdist('dist')")
    if subprocess.run([sys.executable, str(ROOT / "tools" / "wheels.py")], cwd=ROOT, check=False).returncode:
        raise SystemExit(f"the wheels failed. To begin anew: git tag -d v{version} && git reset --hard HEAD~1")
    shutil.copy(ROOT / HASHED, ROOT / "dist" / f"tureen-{version}-{HASHED}")
    print(
        f"{version} is in dist/. To publish: git push --follow-tags, twine upload dist/tureen-{version}*.whl "
        f"dist/tureen-{version}.tar.gz; and beside them tureen-{version}-{HASHED}"
    )
    return 0


def prepare(root: Path, version: str, today: datetime.date) -> list[Path]:
    """Writes the version and the changelog, removes the fragments. Returns the paths that changed. Raises SystemExit
    where the version is not a later one, or nothing has changed since the last."""
    fragments = [path for path in sorted((root / "changes").glob("*.md")) if path.name != README]
    if not fragments:
        raise SystemExit("changes/ has no fragment: nothing is new")
    for name, pattern in PLACES.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        match = re.search(pattern, text)
        if match is None:
            raise SystemExit(f"{name} names no version")
        is_first = "\n## " not in (root / "CHANGELOG.md").read_text(encoding="utf-8")
        if _numbers(version) < _numbers(match[1]) or (_numbers(version) == _numbers(match[1]) and not is_first):
            raise SystemExit(f"{version} is not later than {match[1]}, which {name} names")
        path.write_text(text[: match.start(1)] + version + text[match.end(1) :], encoding="utf-8")
    changelog = root / "CHANGELOG.md"
    old = changelog.read_text(encoding="utf-8").replace(NOTHING_YET, "")
    head, separator, rest = old.partition("\n## ")
    changelog.write_text(f"{head.rstrip()}\n\n{section(version, today, fragments)}{separator}{rest}", encoding="utf-8")
    for path in fragments:
        path.unlink()
    return [root / name for name in (*PLACES, "CHANGELOG.md", "changes")]


def section(version: str, today: datetime.date, fragments: list[Path]) -> str:
    """Returns the changelog's section: a point for each paragraph of the fragments."""
    texts = [path.read_text(encoding="utf-8").strip() for path in fragments]
    points = [paragraph.strip() for text in texts for paragraph in re.split(r"\n\s*\n", text)]
    return f"## {version} ({today:%Y-%m-%d})\n\n" + "".join(f"- {_indented(point)}\n" for point in points)


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def run(*command: str) -> str:
    """Returns what a command prints. Raises SystemExit where it fails."""
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
