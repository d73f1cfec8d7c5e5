"""Child processes import nothing from the current folder, and end with the process that started them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

from decoys import Decoys, imported_by_python
from timeouts import PATIENCE_S

from tureen.sandbox import child_process


def test_a_child_and_the_command_import_nothing_from_the_current_folder(tmp_path, monkeypatch):
    checks = (a_child_imports_nothing_from_the_current_folder, the_command_imports_nothing_from_the_current_folder)
    for number, check in enumerate(checks):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(folder)
    a_child_searches_the_absolute_folders_of_pythonpath_alone(tmp_path, monkeypatch)


def a_child_imports_nothing_from_the_current_folder(tmp_path):
    decoys = Decoys(tmp_path)
    program = tmp_path / "program.py"
    program.write_text("import json, msgspec, numpy, tureen.serving.child, sys; print(*sys.argv[1:])")
    child = child_process.start(str(program), "a", "b", cwd=decoys.folder, stdout=subprocess.PIPE)
    said, _ = child.communicate()
    assert (child.returncode, said, decoys.imported) == (0, b"a b\n", [])


def a_child_searches_the_absolute_folders_of_pythonpath_alone(tmp_path, monkeypatch):
    """Also a helper, whose environment is not this process's. An empty entry is the child's current folder."""
    decoys, packages = Decoys(tmp_path), tmp_path / "packages"
    packages.mkdir()
    (packages / "only_here.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(packages), "decoys"]))
    program = tmp_path / "program.py"
    program.write_text("import msgspec, only_here, os; print(os.environ['PYTHONPATH'])")
    for environment in ({}, {"env": {"PATH": os.defpath}}):
        child = child_process.start(str(program), cwd=decoys.folder, stdout=subprocess.PIPE, **environment)
        said, _ = child.communicate()
        assert (child.returncode, said.decode(), decoys.imported) == (0, f"{packages}\n", [])


def test_ctrl_c_in_a_terminal_does_not_end_a_child_that_just_starts(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT); print('runs')")
    child = child_process.start(str(program), stdout=subprocess.PIPE)
    said, _ = child.communicate()
    assert (child.returncode, said) == (0, b"runs\n")


def the_command_imports_nothing_from_the_current_folder(tmp_path):
    decoys = Decoys(tmp_path, without=imported_by_python())
    for words in (["-m", "tureen", "--version"], ["-umtureen.launch_server", "--help"]):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=decoys.folder, capture_output=True, text=True, check=False)
        assert (done.returncode, decoys.imported) == (0, []), done.stderr


GENERATIONS = """
import os, subprocess, sys, threading
from tureen.sandbox import child_process

def begin():
    numbers.append(threading.get_native_id())
    child = child_process.start(__file__, str(int(sys.argv[1]) - 1), stdout=subprocess.PIPE)
    pids.append(child.stdout.readline().decode().strip())  # by now the child has tied its life to its parent's

numbers, pids = [], [str(os.getpid())]
if int(sys.argv[1]):
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    while str(numbers[0]) in os.listdir("/proc/self/task"):
        os.sched_yield()
print(*pids, flush=True)
sys.stdin.read()
"""
"""A process with as many generations of children as its argument says. A thread that ends starts each child."""


def test_stopped_children_and_grandchildren_end_with_the_process_and_not_with_the_thread_that_started_them(tmp_path):
    program = tmp_path / "generations.py"
    program.write_text(GENERATIONS)
    command = [sys.executable, str(program), "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        pids = [int(word) for word in first.stdout.readline().split()]
        assert len(pids) == 3
        ends = [os.pidfd_open(pid) for pid in pids]
        try:
            assert select.select(ends, [], [], 0)[0] == []
            for pid in reversed(pids):
                os.kill(pid, signal.SIGSTOP)
            first.kill()
            for end in ends:
                assert select.select([end], [], [], PATIENCE_S)[0]
        finally:
            for end in ends:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(end, signal.SIGKILL)
                os.close(end)
