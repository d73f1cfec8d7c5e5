"""The commands about servers and this machine, run as people run them: ps, stop, doctor, bench, list."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import own_home
import pytest
from server_process import ServerProcess


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A home of its own with a small model in its cache: the variables, and the model's path."""
    return own_home.make(tmp_path_factory.mktemp("home"))


def run(own, *arguments, status=0):
    return run_python(own, "-m", "tureen", *arguments, status=status)[status]


def run_python(own, *arguments, status=0):
    """Return what it prints on both streams."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **own})
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def test_doctor_list_and_bench_say_what_is_here_and_how_to_get_what_is_not(places):
    list_and_doctor_load_nothing_heavy_and_doctor_says_how_to_get_a_model(places)
    doctor_measures_a_model_and_names_no_path_or_value_and_bench_says_how_to_start_a_server(places)


def list_and_doctor_load_nothing_heavy_and_doctor_says_how_to_get_a_model(places):
    own, _ = places
    code = (
        "import sys\nfrom tureen.cli import command_line as cli\nassert cli.main(['list']) == 0\n"
        "assert not {'torch', 'numpy', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "print(len(sys.modules), file=sys.stderr)\n"
        "assert cli.main(['doctor']) == 0\nassert 'torch' not in sys.modules"
    )
    shown, num_modules = run_python(own, "-c", code)
    assert int(num_modules) < 250  # each is a file that is read
    assert "is not on this machine: nothing was measured; run tureen pull" in shown


def test_a_server_is_seen_under_one_name_while_it_runs_and_stopped_by_name(places):
    a_server_is_seen_while_it_runs_and_stopped_by_name(places)
    a_server_that_was_killed_is_not_seen_and_its_note_is_gone(places)


def a_server_is_seen_while_it_runs_and_stopped_by_name(places):
    own, path = places
    assert json.loads(run(own, "ps", "--json")) == []
    with ServerProcess("--model-path", str(path), env=own) as server:
        server.wait_ready()
        (seen,) = json.loads(run(own, "ps", "--json"))
        assert (seen["pid"], seen["url"], seen["path"]) == (server.process.pid, server.url, str(path))
        (listed,) = json.loads(run(own, "list", "--json"))["models"]
        answers = {path: httpx.get(server.url + path).json() for path in ("/v1/models", "/api/tags", "/api/ps")}
        names = {
            "ps": seen["model"],
            "show": re.search("^name +(.*)$", run(own, "show", str(path)), re.MULTILINE)[1],
            "banner": re.search("^  model +(.*?)  ", server.output, re.MULTILINE)[1],
            "/v1/models": answers["/v1/models"]["data"][0]["id"],
            "/api/tags": answers["/api/tags"]["models"][0]["name"],
            "/api/ps": answers["/api/ps"]["models"][0]["name"],
        }
        assert names == dict.fromkeys(names, "tiny")
        assert listed["name"] == str(path)  # a file that was copied here, which no other name finds
        assert "no server has the name or process id 99" in run(own, "stop", "99", status=1)
        said = run(own, "stop", server.url.rpartition(":")[2])
        assert "running ones may finish within 30 s" in said
        assert said.endswith("stopped\n")
        assert server.process.wait() == 0
    assert "no server runs here" in run(own, "ps")
    assert "no server runs here" in run(own, "stop", status=1)


def a_server_that_was_killed_is_not_seen_and_its_note_is_gone(places):
    own, path = places
    with ServerProcess("--model-path", str(path), env=own) as server:
        server.wait_ready()
        note = path.parents[3] / "run" / "tureen" / f"{server.process.pid}.json"
        assert note.exists()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert json.loads(run(own, "ps", "--json")) == []
        assert not note.exists()


def doctor_measures_a_model_and_names_no_path_or_value_and_bench_says_how_to_start_a_server(places):
    own, path = places
    report = run({**own, "HF_TOKEN": "hf_secret"}, "doctor", "--model", str(path))
    lines = {line[:13].strip(): line[13:] for line in report.splitlines() if line[:13].strip()}
    assert {"kernels", "memory", "disk", "extras", "variables", "model"} <= lines.keys()
    assert "tok/s for one stream, measured over" in lines["speed"]
    assert "HF_TOKEN" in lines["variables"]
    assert "hf_secret" not in report
    assert own["HOME"] not in report
    said = run(own, "bench", "--url", "http://127.0.0.1:9", status=1)
    assert "start one with tureen serve" in said
    assert said.count("\n") == 1
