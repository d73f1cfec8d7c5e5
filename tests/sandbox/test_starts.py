"""Which modules start processes, and when the current folder is left out of the search path."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import tureen

PACKAGE = Path(tureen.__file__).parent
STARTS = re.compile(
    r"\b(?:subprocess\.(?:Popen|run|call|check_call|check_output|getoutput|getstatusoutput)\b(?!\[)"
    r"|os\.(?:fork|forkpty|popen|system|posix_spawnp?|spawn[lv]\w*|exec[lv]\w*)\b"
    r"|from (?:subprocess|multiprocessing|pty)\b|import (?:multiprocessing|pty)\b|create_subprocess_\w+)"
)
"""What starts processes; a type such as subprocess.Popen[bytes] does not."""


def test_one_module_alone_starts_processes_and_fork_servers_fork():
    starts = {
        path.relative_to(PACKAGE).as_posix(): set(STARTS.findall(path.read_text())) for path in PACKAGE.rglob("*.py")
    }
    assert {name: names for name, names in starts.items() if names} == {
        "sandbox/child_process.py": {"subprocess.Popen"},
        "sandbox/fork_server.py": {"os.fork"},  # each worker ties its life to its fork server's
    }


@pytest.mark.parametrize(
    ("words", "num_arguments", "is_started"),
    [
        (["-m", "tureen", "serve"], 2, True),
        (["-X", "dev", "-mtureen.launch_server"], 1, True),
        (["-m", "sglang.launch_server", "--port", "1"], 3, True),
        (["-m", "pytest", "tureen"], 2, False),
        (["-m", "tureens"], 1, False),
        (["program.py", "-m", "tureen"], 3, False),
    ],
)
def test_only_where_python_runs_a_module_of_tureen_the_current_folder_is_left_out(
    monkeypatch, words, num_arguments, is_started
):
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setattr(sys, "argv", ["-m"] * num_arguments)
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    assert tureen._is_started_by_module() is is_started
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert not tureen._is_started_by_module()
