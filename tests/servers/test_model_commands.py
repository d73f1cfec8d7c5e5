"""The commands about models and servers, run as people run them: list, show, pull, rm, ps, stop, doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import tiny_gguf
import tiny_models
from server_process import ServerProcess

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A home of its own with a small model in its cache: the variables, and the model's path."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "cache" / "tureen" / "mine"
    folder.mkdir(parents=True)
    model = tiny_models.write(home / "hf", "llama")
    path = tiny_gguf.write_from_transformers(folder / "tiny.gguf", model)
    (home / "run").mkdir()
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "XDG_RUNTIME_DIR": str(home / "run")}
    return own, path


def run(own, *arguments, status=0):
    command = [sys.executable, "-m", "tureen", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **own})
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def test_list_names_what_is_here_and_what_could_be(places):
    own, path = places
    listed = json.loads(run(own, "list", "--json"))
    assert listed["models"] == [{"name": str(path), "path": str(path), "bytes": path.stat().st_size}]
    assert "smollm2:135m" in listed["shelf"]
    assert str(path) in run(own, "list")


def test_list_loads_nothing_heavy_so_that_it_is_there_at_once(places):
    own, _ = places
    code = (
        "import sys\nfrom tureen.cli import command_line as cli\nassert cli.main(['list']) == 0\n"
        "assert not {'torch', 'numpy', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "print(len(sys.modules), file=sys.stderr)"
    )
    environment = {**os.environ, **own}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr) < 250  # modules: each is a file that is read


def test_show_says_whether_a_model_fits(places):
    own, path = places
    shown = run(own, "show", str(path), "--context-length", "64")
    assert "LlamaForCausalLM" in shown
    assert "(64 tokens at" in shown
    assert "it fits" in shown


def test_a_name_that_is_none_is_one_line_with_what_was_meant(places):
    own, _ = places
    assert "did you mean smollm2:135m?" in run(own, "show", "smolm2:135m", status=1)


def test_a_file_that_nobody_pulled_is_not_removed(places):
    own, path = places
    assert "delete other files yourself" in run(own, "rm", str(path), status=1)
    assert path.exists()


def test_a_server_is_seen_while_it_runs_and_stopped_by_name(places):
    own, path = places
    assert json.loads(run(own, "ps", "--json")) == []
    with ServerProcess("--model-path", str(path), env=own) as server:
        server.wait_ready()
        (seen,) = json.loads(run(own, "ps", "--json"))
        assert (seen["pid"], seen["url"], seen["model"]) == (server.process.pid, server.url, str(path))
        assert "no server 99" in run(own, "stop", "99", status=1)
        said = run(own, "stop", server.url.rpartition(":")[2])
        assert "may finish those that run for 30 s" in said
        assert said.endswith("stopped\n")
        assert server.process.wait() == 0
    assert "no server runs here" in run(own, "ps")
    assert "no server runs here" in run(own, "stop", status=1)


def test_a_server_that_was_killed_is_not_seen_and_its_note_is_gone(places):
    own, path = places
    with ServerProcess("--model-path", str(path), env=own) as server:
        server.wait_ready()
        note = path.parents[3] / "run" / "tureen" / f"{server.process.pid}.json"
        assert note.exists()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert json.loads(run(own, "ps", "--json")) == []
        assert not note.exists()


def test_doctor_measures_a_model_that_is_here_and_names_no_path_or_value(places):
    own, path = places
    report = run({**own, "HF_TOKEN": "hf_secret"}, "doctor", "--model", str(path))
    lines = {line[:13].strip(): line[13:] for line in report.splitlines() if line[:13].strip()}
    assert {"kernels", "memory", "disk", "extras", "variables", "model"} <= lines.keys()
    assert "tok/s for one stream, measured over" in lines["speed"]
    assert "HF_TOKEN" in lines["variables"]
    assert "hf_secret" not in report
    assert own["HOME"] not in report


def test_doctor_without_a_model_says_so_and_how_to_get_one(places):
    own, _ = places
    code = (
        "import sys\nfrom tureen.cli import command_line as cli\nassert cli.main(['doctor']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **own}
    )
    assert done.returncode == 0, done.stderr
    assert "is not here, so nothing was measured; tureen pull" in done.stdout


def test_bench_without_a_server_says_how_to_start_one(places):
    own, _ = places
    said = run(own, "bench", "--url", "http://127.0.0.1:9", status=1)
    assert "start one with tureen serve" in said
    assert said.count("\n") == 1
