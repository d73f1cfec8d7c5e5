"""No command shows a traceback for what its user can cause: each is tried with files, folders and packages that fail.

The commands are those of `tureen --help`, so a new one is tried, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import os
import re
import sys
from pathlib import Path

import pytest

from tureen.__main__ import CLOSED_PIPE
from tureen.__main__ import main as program
from tureen.cli import command_line as cli
from tureen.extras import EXTRAS
from tureen.http.server import is_no_cancellation

COMMANDS = cli._names()
NAMES_A_MODEL = ("engine", "generate", "pull", "rm", "serve", "show")
ARGUMENTS = {
    "bench": ["--url", "http://127.0.0.1:1"],
    "chat": ["{model}"],
    "completion": ["bash"],
    "config": ["show"],
    "engine": ["{model}", "--listen", "127.0.0.1:0"],
    "generate": ["a", "--model", "{model}"],
    "migrate": ["--", "vllm", "serve", "m"],
    "pull": ["{model}"],
    "rm": ["{model}"],
    "serve": ["{model}", "--port", "0"],
    "show": ["{model}"],
    "stop": ["1"],
}
"""The arguments of commands that need some; {model}: what is wrong with the model."""
BAD_MODELS = {
    "no folder": None,
    "an empty folder": {},
    "no JSON": {"config.json": "{"},
    "no object": {"config.json": "[]"},
    "no architecture": {"config.json": "{}", "tokenizer.json": "{}"},
    "numbers for words": {"config.json": '{"architectures": 5, "model_type": []}', "tokenizer.json": "[]"},
    "a broken GGUF": {"m.gguf": "GGUF\3"},
}


def write(folder: Path, files: dict[str, str] | None) -> str:
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    return str(folder)


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Nothing is fetched, and no server of this machine is found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("signal.signal", lambda *_: None)


def status_of(*arguments: str) -> int:
    try:
        return program(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


@pytest.mark.parametrize("command", NAMES_A_MODEL)
@pytest.mark.parametrize("fault", BAD_MODELS)
def test_a_bad_model_is_one_line_of_each_command(command, fault, tmp_path, capsys):
    model = write(tmp_path / "model", BAD_MODELS[fault])
    status = status_of(command, *(each.format(model=model) for each in ARGUMENTS[command]))
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    is_there = command == "pull" and Path(model).exists()  # and pull reads no model
    assert (status, printed.err.count("tureen: ")) == ((0, 0) if is_there else (1, 1))


FAULTS = {
    "a full disk": OSError(errno.ENOSPC, "No space left on device", "/full/file"),
    "a folder that may not be written": PermissionError(errno.EACCES, "Permission denied", "/locked/folder"),
    "a link that leads to itself": OSError(errno.ELOOP, "Too many levels of symbolic links", "/loop"),
    "a package that is missing": ModuleNotFoundError("No module named 'safetensors'", name="safetensors"),
    "a dependency that is missing": ModuleNotFoundError("No module named 'tqdm.std'", name="tqdm.std"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_in_a_command_is_a_line_that_names_it(command, fault, capsys, monkeypatch):
    def run(_) -> int:
        raise FAULTS[fault]

    monkeypatch.setattr(f"tureen.cli.commands.{command}.run", run)
    assert status_of(command, *ARGUMENTS.get(command, ())) == 1
    (line,) = capsys.readouterr().err.splitlines()
    error = FAULTS[fault]
    assert line.startswith(f"tureen: {getattr(error, 'filename', None) or error.name}")
    assert isinstance(error, OSError) or "pip install" in line


def test_our_own_module_that_is_missing_is_no_fault_of_the_user(monkeypatch):
    def run(_) -> int:
        importlib.import_module("tureen.no_such_module")
        return 0

    monkeypatch.setattr("tureen.cli.commands.list.run", run)
    with pytest.raises(ModuleNotFoundError):
        program(["list"])


WITHOUT_EXTRAS = [
    ["models", "build", "shapes-vlm"],
    ["check"],
    ["models"],
    ["generate", "--device", "cuda", "--download-dir", "/nowhere", "Hello"],
    ["serve", "--tls-cert", "a", "--tls-key", "b", "--download-dir", "/nowhere"],
]
"""Commands that run without the extras, or name the extra before they load anything."""


@pytest.mark.parametrize("arguments", WITHOUT_EXTRAS, ids=" ".join)
def test_without_any_extra_a_command_runs_or_names_the_extra(arguments, capsys, monkeypatch):
    class Hidden:
        """An installation without the extras."""

        def find_spec(self, name, path=None, target=None):
            if any(f"{name}.".startswith(f"{module}.") for module in EXTRAS):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] in {one.partition(".")[0] for one in EXTRAS}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "tureen.recipes.shapes_vlm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    status = status_of(*arguments)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    if status:
        assert re.search(r"not installed: pip install 'tureen\[\w+\]'\n", printed.err), printed.err


@pytest.mark.parametrize("command", ["", "--help", *COMMANDS])
def test_a_command_whose_reader_left_ends_quietly(command, tmp_path, monkeypatch):
    """As `tureen … | head -1` leaves it: here each command's help, which all of them print alike."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        arguments = [] if not command else ["--help"] if command == "--help" else [command, "--help=all"]
        assert program(arguments) == CLOSED_PIPE
        print("what Python still flushes at its end", flush=True)


@pytest.mark.parametrize("arguments", [["--version"], ["help"], ["serve", "--help"], ["config", "show"]], ids=str)
def test_output_that_finds_no_space_is_one_line_and_is_not_tried_again(arguments, capsys, monkeypatch):
    with contextlib.suppress(OSError), open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        found = status_of(*arguments), sys.stdout
    assert found == (1, None)  # with stdout left there, Python's last flush fails, and the exit status is 120
    assert capsys.readouterr().err == "tureen: stdout: No space left on device\n"


@pytest.mark.parametrize(("error", "is_shown"), [(asyncio.CancelledError(), False), (ValueError(), True)])
def test_a_request_that_the_shutdown_cancels_leaves_no_traceback_in_the_log(error, is_shown):
    facts = {"exc_info": (type(error), error, None), "msg": "Exception in ASGI application"}
    assert is_no_cancellation(logging.makeLogRecord(facts)) is is_shown
