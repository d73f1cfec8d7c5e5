"""Starts child processes. No other module of tureen does.

A child never imports from the current folder, which may be a model that somebody downloaded. The kernel kills a child
when this process ends, even if the child is stopped.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tureen.sandbox.limits import die_with_parent

if TYPE_CHECKING:
    Child = subprocess.Popen[bytes]
    _Jobs = queue.SimpleQueue[tuple[Future[Child], Sequence[str], dict[str, Any]]]

_lock = threading.Lock()
_jobs: tuple[int, _Jobs] | None = None
"""The process id of this process, which changes in a fork, and the queue of its starting thread."""


def start(program: str, *arguments: str, **options: Any) -> Child:
    """Start a Python program as a child process.

    program: a module, or the absolute path of a file. options: those of subprocess.Popen. Raises OSError.
    """
    options["env"] = _with_search_path(options.get("env"))
    command = [sys.executable, "-P", "-m", "tureen.sandbox.child_main", str(os.getpid()), program, *arguments]
    started: Future[Child] = Future()
    _starting_thread().put((started, command, options))
    return started.result()


def _with_search_path(environment: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment, by default this process's, with the absolute folders of this process's PYTHONPATH. An
    empty or relative entry would stand for the child's current folder."""
    kept = dict(os.environ if environment is None else environment)
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(folder)]
    kept.pop("PYTHONPATH", None)
    return kept | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})


def start_command(command: Sequence[str], **options: Any) -> Child:
    """Start a command that a user named. Call it in the main thread, before other threads run. Raises OSError."""
    return subprocess.Popen(command, preexec_fn=partial(die_with_parent, os.getpid()), **options)


def _starting_thread() -> _Jobs:
    """Return the queue of the thread that starts children; start that thread if needed. Raises OSError.

    The kernel kills a child when the thread that started it ends. This thread lives as long as the process.
    """
    global _jobs
    with _lock:
        if _jobs is None or _jobs[0] != os.getpid():
            jobs: _Jobs = queue.SimpleQueue()
            try:
                threading.Thread(target=_start_each, args=(jobs,), name="start-children", daemon=True).start()
            except RuntimeError:
                raise OSError(errno.EAGAIN, "the system starts no thread") from None
            _jobs = os.getpid(), jobs
        return _jobs[1]


def _start_each(jobs: _Jobs) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it: Ctrl-C in a terminal reaches all
    while True:
        started, command, options = jobs.get()
        try:
            started.set_result(cast("Child", subprocess.Popen(command, **options)))
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
            started.set_exception(error)
        del started, options
