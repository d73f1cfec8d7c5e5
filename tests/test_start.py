"""What the server has done when it says that it is ready, counted rather than timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import tiny_gguf
import tiny_models

UNNEEDED = (
    "torch",
    "transformers",
    "huggingface_hub",
    "PIL",
    "cryptography",  # without TLS
    "rich",  # without a terminal
    "starlette.middleware.cors",  # without --allowed-origins
    "opentelemetry",  # without traces
    "tureen.http.tracing",
    "tureen.engine.times",
    "regex",
    "jsonschema_rs",
    "llguidance",
    "dill",
    "importlib.metadata",
    "tureen.bench",
    "tureen.constraining.check",
    "tureen.constraining.compile_worker",
    "tureen.grammar.frontends",
    "tureen.grammar.schema",
    "tureen.media.decode_worker",
    "tureen.control.live",  # until somebody looks
    "tureen.cache.summary",
    "tureen.runner.torch_forward",
)
MOST_MODULES = 836
"""Each is a file that a cold start fetches from the disk. Lower it when fewer are needed."""

SCRIPT = """
import gc, json, os, signal, sys, threading
from pathlib import Path
from tureen import server
from tureen.cli import command_line as cli

def at_ready(*_, **__):
    tasks = Path("/proc/self/task").iterdir()
    facts = {
        "modules": sorted(sys.modules),
        "children": [pid for task in tasks for pid in (task / "children").read_text().split()],
        "collects": gc.isenabled(),
        "frozen": gc.get_freeze_count(),
    }
    print(json.dumps(facts), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return ""

server.banner = at_ready
sys.exit(cli.main(["serve", "--model-path", sys.argv[1], "--port", "0", "--device", "cpu"]))
"""


@pytest.fixture(scope="module")
def at_ready(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_models.write(folder / "hf", "llama")
    path = tiny_gguf.write_from_transformers(folder / "m.gguf", model)
    command = [sys.executable, "-c", SCRIPT, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "HOME": str(folder)})
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_nothing_is_imported_that_only_some_requests_need(at_ready):
    of_unneeded = tuple(f"{name}." for name in UNNEEDED)
    assert [one for one in at_ready["modules"] if f"{one}.".startswith(of_unneeded)] == []


def test_a_start_does_not_import_more_and_more(at_ready):
    assert len(at_ready["modules"]) <= MOST_MODULES


def test_no_helper_process_is_started_before_the_server_is_ready(at_ready):
    assert at_ready["children"] == []


def test_garbage_is_collected_again_once_the_server_is_ready(at_ready):
    assert at_ready["collects"]
    assert at_ready["frozen"] > 0
