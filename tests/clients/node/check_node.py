"""Clients in JavaScript, run by Node: a script says what is asked and what must come back."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MODULES = HERE.parents[2] / "build" / "clients" / "node" / "node_modules"
SCRIPTS = sorted(script.stem for script in HERE.glob("*.mjs") if script.stem != "questions")
IMPORTED = re.compile(r'^import .* from "((?:@[^"/]+/)?[^"./:]+)[^":]*";$', re.MULTILINE)


def describe_script(script):
    """Returns its name as a client, its title, and the versions of the packages that it imports."""
    text = (HERE / f"{script}.mjs").read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("// ").rstrip(".")
    packages = sorted({name for name in IMPORTED.findall(text) if name != "zod"} - {"node"})
    read = {name: json.loads((MODULES / name / "package.json").read_text(encoding="utf-8")) for name in packages}
    return f"{script}_js", title, {name: package["version"] for name, package in read.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_finds_everything_right(url, tmp_path, script):
    (tmp_path / "node_modules").symlink_to(MODULES)
    for file in ("questions", script):
        (tmp_path / f"{file}.mjs").write_text((HERE / f"{file}.mjs").read_text(encoding="utf-8"), encoding="utf-8")
    command = ["node", str(tmp_path / f"{script}.mjs"), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* passed$", done.stdout, re.MULTILINE)
