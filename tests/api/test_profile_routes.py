"""Profiles of a tiny real model's steps: files for trace viewers, below the operator's folder and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from real_app import RealApp, write_model

from tureen.admin.profile_routes import profile_root
from tureen.errors import InvalidRequest, StartupError
from tureen.kernels.cpu import native
from tureen.runner.trace import Profiler

PARAMS = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 1)
    return folder


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request):
    if request.param == "native" and native.load() is None:
        pytest.skip("no native kernels")
    return request.param


@pytest.fixture(scope="module")
def server(folder, kernels, tmp_path_factory):
    root = tmp_path_factory.mktemp("profiles")
    with RealApp(folder, kernels=kernels, profile_dir=str(root)) as app:
        yield app


@pytest.fixture
def app(server):
    yield server
    server.post("/stop_profile")


def root_of(app):
    return Path(app.config.profile_dir)


def generate(app, num_prompt=5):
    return app.generate(input_ids=list(range(9, 9 + num_prompt)), sampling_params=PARAMS)["output_ids"]


def test_a_profile_has_each_step_with_what_it_computed(app, kernels):
    expected = generate(app)
    app.post("/flush_cache")
    started = app.post("/start_profile", output_dir="one/two", profile_prefix="mine")
    assert started.text.startswith("Start profiling.\n")
    assert generate(app) == expected
    stopped = app.post("/stop_profile")
    (file,) = (root_of(app) / "one" / "two").glob("mine-*.trace.json")
    for answer in (started, stopped):
        assert answer.status_code == 200
        assert f"one/two/{file.name}" in answer.text
        assert str(root_of(app)) not in answer.text
    events = json.loads(file.read_text())["traceEvents"]
    steps = [event for event in events if event.get("ph") == "X" and event["name"].startswith("step")]
    facts = [one["args"]["tokens"] for one in steps] if kernels == "native" else [_tokens(one["name"]) for one in steps]
    assert facts == [5, 1, 1, 1, 1, 1]
    assert all(one["dur"] > 0 for one in steps)
    inside = "forward pass" if kernels == "native" else "aten::index_select"
    found = [event for event in events if event["name"] == inside]
    assert len(found) >= len(steps)
    assert all(any(_is_within(event, step) for step in steps) for event in found)


def _tokens(name):
    return int(name.split("tokens ")[1].split(",")[0])


def _is_within(event, step):
    return step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1


def test_a_profile_of_some_steps_ends_by_itself(app):
    assert app.post("/start_profile", output_dir="few", num_steps=2).status_code == 200
    generate(app)
    (file,) = (root_of(app) / "few").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    assert sum(event["name"].startswith("step") and event.get("ph") == "X" for event in events) == 2
    assert app.post("/stop_profile").json()["error"]["code"] == "no_profile"
    assert app.request("GET", "/start_profile").status_code == 200


def test_there_is_one_profile_at_a_time(app):
    assert app.post("/stop_profile").status_code == 409
    assert app.post("/start_profile").status_code == 200
    refused = app.post("/start_profile")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "profile_running")
    assert app.post("/release_memory_occupation").json()["error"]["code"] == "profile_running"
    assert app.request("GET", "/stop_profile").status_code == 200
    assert app.post("/resume_memory_occupation").status_code == 200


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"start_step": 3}, "start_step"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"merge_profiles": True}, "merge_profiles"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 10**9}, "num_steps"),
        ({"activities": ["MEM"]}, "activities"),
        ({"activities": ["CPU", "GPU"]}, "activities"),
        ({"activities": []}, "activities"),
        ({"profile_prefix": "../up"}, "profile_prefix"),
        ({"profile_prefix": "a/b"}, "profile_prefix"),
        ({"profile_id": "1"}, "profile_id"),
    ],
)
def test_what_is_not_recorded_is_refused_by_name(app, fields, name):
    answer = app.post("/start_profile", **fields)
    assert (answer.status_code, answer.json()["error"]["param"].split("[")[0]) == (400, name)
    assert app.post("/stop_profile").status_code == 409


def test_what_only_torch_records_is_refused_natively(app, kernels):
    for name in ("with_stack", "record_shapes"):
        before = sorted(root_of(app).iterdir())
        answer = app.post("/start_profile", **{name: True}, num_steps=1)
        assert answer.status_code == (400 if kernels == "native" else 200)
        if kernels == "native":
            assert answer.json()["error"]["param"] == name
            assert sorted(root_of(app).iterdir()) == before
        app.post("/stop_profile")


@pytest.mark.parametrize("name", ["..", "a/../../b", "/tmp", "/", "x" * 300, "a\0b", "link", "link/deeper", "file"])
def test_a_profile_is_never_written_elsewhere(app, tmp_path, name):
    root = root_of(app)
    (root / "file").write_text("mine")
    if not (root / "link").is_symlink():
        os.symlink(tmp_path, root / "link")
    before = sorted(tmp_path.parent.rglob("*"))
    answer = app.post("/start_profile", output_dir=name)
    assert answer.status_code in (400, 403), answer.text
    assert answer.json()["error"]["param"] == "output_dir"
    assert str(root) not in answer.text
    assert sorted(tmp_path.parent.rglob("*")) == before
    assert (root / "file").read_text() == "mine"
    assert app.post("/stop_profile").status_code == 409


def test_nothing_is_recorded_where_nothing_can_be_written(tmp_path):
    made = []
    for folder in ("..", "/tmp"):
        with pytest.raises(InvalidRequest):
            Profiler().start(lambda: made.append(1), root=str(tmp_path), folder=folder, prefix="", num_steps=None)
    assert made == []


def test_a_folder_may_be_named_from_the_root_of_the_file_system(app):
    assert app.post("/start_profile", output_dir=str(root_of(app) / "deep"), num_steps=1).status_code == 200
    generate(app)
    assert len(list((root_of(app) / "deep").iterdir())) == 1


def test_by_default_profiles_are_written_where_only_this_machine_reaches_the_server(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert profile_root(None, "127.0.0.1") == tmp_path
    assert profile_root(None, "0.0.0.0") is profile_root("", "127.0.0.1") is None
    with pytest.raises(StartupError, match="--profile-dir nowhere: there is no such folder"):
        profile_root("nowhere", "127.0.0.1")
    with RealApp(folder, kernels="torch", host="0.0.0.0") as app:
        answer = app.post("/start_profile")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_profile_dir")
        assert app.post("/stop_profile").status_code == 409
