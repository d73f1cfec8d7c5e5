"""What the server has done when it says that it is ready, counted rather than timed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf
import tiny_models

import tureen

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
    "dill",
    "importlib.metadata",
    "tureen.bench",
    "tureen.grammar_service.check",
    "tureen.grammar_service.compile_worker",
    "tureen.grammar.frontends",
    "tureen.grammar.schema",
    "tureen.media.decode_worker",
    "tureen.admin.live",  # until somebody looks
    "tureen.cache.summary",
    "tureen.runner.torch_forward",
)
OF_FAMILIES = ("tureen.models.", "tureen.text.tool_")
"""Prefixes of modules that exist once per family of models or format of calls."""
MOST_MODULES = 905
"""Not counting those. Each is a file that a cold start fetches from the disk. Lower it when fewer are needed."""

IMPORTED_BEFORE_THE_PORT_OPENS = {
    "batches.lines": "--batch-path",
    "batches.results": "--batch-path",
    "dialects.openai.batches": "--batch-path",
    "multi_model.edge": "--models",
    "api_workers.proxy": "--api-workers",
    "api_workers.wire": "--api-workers",
    "data_parallel.control_calls": "tureen engine",
    "data_parallel.handshake": "--replicas",
    "runner.rank_orders": "--tensor-parallel-size",
    "runner.shared_weights": "--engine process",
}
"""Modules with Structs that only servers with a setting import."""
USED_BY_ONE_THREAD = {
    "grammar_service.check": "its executor has one thread",
    "grammar.regex_nodes": "no Struct of it is decoded",
    "media.gemma3": "no Struct of it is decoded",
    "media.gemma4_vision": "no Struct of it is decoded",
    "media.idefics3_vision": "no Struct of it is decoded",
    "media.qwen_vision": "no Struct of it is decoded",
    "media.vision_config": "no Struct of it is decoded",
    "models.encoder": "no Struct of it is decoded",
}
OTHER_PROGRAMS = ("bench", "cli")
CLASS = re.compile(r"^ *class (\w+)\(([^)]*)\)", re.MULTILINE)

SCRIPT = """
import gc, json, os, signal, sys, threading
from pathlib import Path
from tureen import server
from tureen.cli import command_line as cli
from tureen.struct_warm_up import imported_structs
from warm_structs import is_warm

def at_ready(*_, **__):
    tasks = Path("/proc/self/task").iterdir()
    facts = {
        "modules": sorted(sys.modules.keys() - {"warm_structs"}),
        "children": [pid for task in tasks for pid in (task / "children").read_text().split()],
        "collects": gc.isenabled(),
        "frozen": gc.get_freeze_count(),
        "structs": {f"{kind.__module__}.{kind.__name__}": is_warm(kind) for kind in imported_structs()},
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
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_server_that_is_ready_has_imported_no_more_than_it_needs_and_all_types_that_threads_share(at_ready):
    nothing_is_imported_that_only_some_requests_need_and_not_more_and_more(at_ready)
    at_ready_no_helper_process_runs_and_garbage_is_collected_again(at_ready)
    no_type_is_used_for_the_first_time_by_two_requests_at_once(at_ready)
    a_module_with_structs_that_is_imported_later_is_known(at_ready)


def nothing_is_imported_that_only_some_requests_need_and_not_more_and_more(at_ready):
    of_unneeded = tuple(f"{name}." for name in UNNEEDED)
    assert [one for one in at_ready["modules"] if f"{one}.".startswith(of_unneeded)] == []
    assert len([one for one in at_ready["modules"] if not one.startswith(OF_FAMILIES)]) <= MOST_MODULES


def at_ready_no_helper_process_runs_and_garbage_is_collected_again(at_ready):
    assert at_ready["children"] == []
    assert at_ready["collects"]
    assert at_ready["frozen"] > 0


def no_type_is_used_for_the_first_time_by_two_requests_at_once(at_ready):
    """msgspec would crash the process."""
    structs = at_ready["structs"]
    shared = {"tureen.dialects.openai.chat_body.ChatBody", "tureen.grammar_service.messages.CompileReply"}
    assert shared <= structs.keys()
    assert [name for name, has_info in structs.items() if not has_info] == []


def a_module_with_structs_that_is_imported_later_is_known(at_ready):
    """A thread may decode such a Struct first while another does, too: import the module before the port opens."""
    late = modules_with_structs() - {name.removeprefix("tureen.") for name in at_ready["modules"]}
    late = {name for name in late if name.partition(".")[0] not in OTHER_PROGRAMS}
    assert late == IMPORTED_BEFORE_THE_PORT_OPENS.keys() | USED_BY_ONE_THREAD.keys()


def modules_with_structs() -> set[str]:
    """Read the classes of the whole package from its source."""
    package = Path(tureen.__file__).parent
    bases: dict[str, set[str]] = {}  # of each class
    modules: dict[str, set[str]] = {}  # class -> where it is defined
    for path in package.rglob("*.py"):
        for name, arguments in CLASS.findall(path.read_text(encoding="utf-8")):
            bases.setdefault(name, set()).update(re.split(r"[\s,.]+", arguments))
            modules.setdefault(name, set()).add(".".join(path.relative_to(package).with_suffix("").parts))
    structs, reached = set(), {"Struct"}
    while reached:
        structs |= reached
        reached = {name for name, named in bases.items() if named & structs} - structs
    return set().union(*(modules.get(name, set()) for name in structs))
