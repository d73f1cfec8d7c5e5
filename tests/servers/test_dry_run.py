"""Files that are loaded while a server runs and that freeze or end their reader: the request is refused, and all
others go on. The reader freezes in C with the interpreter held: no handler of a signal and no other thread runs."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import httpx
import pytest
from real_app import write_model
from server_process import ServerProcess
from timeouts import PATIENCE_S, wait_until
from tiny_adapters import write_adapter

HOSTILE = """
import ctypes, importlib.util, os, re, sys

PROGRAM, SHORT = "tureen.runner.dry_run_child", ("sleeps", "computes")
C = ctypes.PyDLL(None)  # its calls hold the interpreter
ACTS = {{
    "sleeps": lambda: C.sleep(1000000),
    "computes": lambda: re.match("(a*)*b", "a" * 64),
    "crashes": lambda: C.abort(),
    "allocates": lambda: [bytes(1 << 30) for _ in range(4 * MEMORY // (1 << 30) + 4)],  # untouched: it costs none
}}
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

def hear(event, arguments):
    if event != "open" or not isinstance(arguments[0], (str, os.PathLike)):
        return
    folder = os.path.basename(os.path.dirname(os.fspath(arguments[0])))
    if folder in ACTS:
        with open({tried!r}, "a") as file:
            file.write(folder + "\\n")
        ACTS[folder]()

class Impatient:
    def find_spec(self, name, *_):
        if name != "tureen.serving.dry_run":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_impatiently(module):
            load(module)
            read, patience = module.read_in_child, module.PATIENCE

            async def read_impatiently(order):
                is_short = os.path.basename(order["path"]) in SHORT
                module.PATIENCE = patience._replace(cpu_s=1.0, idle_s=4.0) if is_short else patience
                return await read(order)

            module.read_in_child = read_impatiently

        spec.loader.exec_module = load_impatiently
        return spec

class Broken:
    def find_spec(self, name, *_):
        if name == "tureen.lora.adapter":
            raise ImportError("this installation is damaged")

sys.addaudithook(hear)
sys.meta_path.insert(0, Impatient())
if PROGRAM in sys.orig_argv and os.path.exists({tried!r} + ".broken"):
    sys.meta_path.insert(0, Broken())
"""
"""A `sitecustomize` in which opening a file of a folder with such a name freezes or ends the process. It gives short
limits to files that freeze their reader, and only to these. A file makes the program of dry runs fail to import."""

ENDS = {
    "sleeps": "did not end within",
    "computes": "did not end within",
    "crashes": "was ended by SIGABRT",
    "allocates": "needs more than half of the free memory",
}
LONG = {"text": "Once", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}}
MODES = {"thread": (), "process": ("--engine", "process", "--api-workers", "2")}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A model, an adapter for it, and copies of both in folders that are named after what happens to their reader."""
    root = tmp_path_factory.mktemp("files")
    write_adapter(write_model(root / "model", 1, max_position_embeddings=4096), root / "adapter")
    for name in ENDS:
        shutil.copytree(root / "adapter", root / "adapters" / name)
        shutil.copytree(root / "model", root / "models" / name)
    return root


@pytest.fixture(scope="module", params=MODES)
def server(request, files, tmp_path_factory):
    hooks = tmp_path_factory.mktemp("hooks")
    (hooks / "sitecustomize.py").write_text(HOSTILE.format(tried=str(hooks / "tried")))
    folders = [str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])]
    with ServerProcess(
        "--model-path", str(files / "model"), *MODES[request.param], env={"PYTHONPATH": os.pathsep.join(folders)}
    ) as running:
        running.hooks = hooks
        yield running.wait_ready()


def post(server, path: str, **body) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)


def tried(server) -> list[str]:
    """Names of the folders that were read, one for each time."""
    file = server.hooks / "tried"
    return file.read_text().split() if file.exists() else []


READ = (("lora_path", "sleeps"), ("lora_path", "crashes"), ("lora_path", "allocates"), ("model_path", "computes"))
"""Fields that name a folder, and what happens to its reader."""


def test_files_that_freeze_or_end_their_reader_are_refused_while_a_stream_goes_on(server, files):
    for field, what in READ:
        are_refused_and_a_stream_goes_on(server, files, field, what)
    other_files_are_loaded_after_that(server, files)
    a_child_that_cannot_import_its_program_blames_no_file_and_the_log_says_why(server, files)


def are_refused_and_a_stream_goes_on(server, files, field, what):
    alone = post(server, "/generate", **LONG).json()["output_ids"]
    before, answers, is_over = len(tried(server)), [], threading.Event()

    def ask_again_and_again() -> None:
        while not is_over.is_set():
            answers.append(post(server, "/generate", **LONG).json()["output_ids"])

    asking = threading.Thread(target=ask_again_and_again)
    asking.start()
    try:
        if field == "lora_path":
            body = {"lora_name": what, "lora_path": str(files / "adapters" / what)}
            answer = post(server, "/load_lora_adapter", **body)
        else:
            answer = post(server, "/update_weights_from_disk", model_path=str(files / "models" / what))
    finally:
        is_over.set()
        asking.join(PATIENCE_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), answer.text
    assert ENDS[what] in error["message"]
    assert answers
    assert all(ids == alone for ids in answers)
    assert tried(server)[before:] == [what]  # no other process has opened the file
    assert "replacing" not in server.output
    assert httpx.get(f"{server.url}/health").status_code == 200


def other_files_are_loaded_after_that(server, files):
    loaded = post(server, "/load_lora_adapter", lora_name="a", lora_path=str(files / "adapter"))
    assert loaded.status_code == 200, loaded.text
    updated = post(server, "/update_weights_from_disk", model_path=str(files / "model"))
    assert updated.status_code == 200, updated.text
    assert post(server, "/unload_lora_adapter", lora_name="a").status_code == 200


def a_child_that_cannot_import_its_program_blames_no_file_and_the_log_says_why(server, files):
    broken = server.hooks / "tried.broken"
    broken.touch()
    try:
        answer = post(server, "/load_lora_adapter", lora_name="a", lora_path=str(files / "adapter"))
    finally:
        broken.unlink()
    assert answer.status_code == 503, answer.text
    wait_until(lambda: "ImportError: this installation is damaged" in server.output, "why, in the log")
    assert "damaged" not in answer.text
