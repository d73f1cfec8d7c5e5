"""Models from a hub: what is fetched, what is fetched again, and a true line for each thing that can go wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import urllib.request
from email.message import Message
from pathlib import Path

import msgspec
import pytest
import tiny_gguf
import tiny_models
import tiny_qwen_vl
from converted_vision import write_pair
from simulated_hub import Simulated
from timeouts import wait_until

from tureen.cli import command_line as cli
from tureen.config import Config
from tureen.errors import StartupError
from tureen.fetching import ggufs
from tureen.fetching import hub as hub_module
from tureen.fetching.download import _SameHost
from tureen.fetching.names import parse
from tureen.fetching.pull import find_here, pull

WEIGHTS = bytes(range(256)) * 40_000  # ten pieces of a download
FOLDER = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{ }",
    "model.safetensors": WEIGHTS,
    "README.md": b"not needed",
    "pytorch_model.bin": b"not wanted",
    "1_Pooling/config.json": b"{}",
    "onnx/model.onnx": b"not needed",
}
GGUFS = {
    "README.md": b"",
    "m-Q4_K_M.gguf": b"GGUF four",
    "m-Q8_0-00001-of-00002.gguf": b"GGUF eight, first",
    "m-Q8_0-00002-of-00002.gguf": b"GGUF eight, second",
    "mmproj-m-f16.gguf": b"GGUF projector",
}


@pytest.fixture
def config(tmp_path):
    return Config(download_dir=str(tmp_path / "cache"))


def _fault(name, config):
    with pytest.raises(StartupError) as caught:
        pull(name, config)
    assert "\n" not in caught.value.message
    return caught.value.message


def _content_requests(hub):
    return [(path, sent) for path, sent in hub.requests if "/resolve/" in path]


def test_a_model_is_its_folder_and_nothing_else_is_fetched(hub, config):
    hub.files["org/name"] = FOLDER
    folder = pull("org/name", config)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert names == ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]
    for name in names:
        assert (folder / name).read_bytes() == FOLDER[name]
    before = len(hub.requests)
    assert pull("hf:org/name", config) == folder
    assert len(hub.requests) == before


def test_the_hubs_own_library_finds_what_was_fetched(hub, config):
    from huggingface_hub import snapshot_download

    hub.files["org/name"] = FOLDER
    folder = pull("org/name", config)
    root = hub_module.Path(config.download_dir) / "hub"
    assert Path(snapshot_download("org/name", cache_dir=root, local_files_only=True)) == folder


def test_what_the_hubs_own_library_fetched_is_found(hub, config, monkeypatch, tmp_path):
    from huggingface_hub import scan_cache_dir

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    hub.files["org/name"] = FOLDER
    folder = pull("org/name", Config())
    assert folder.is_relative_to(tmp_path / "hf" / "hub")
    (repository,) = scan_cache_dir(tmp_path / "hf" / "hub").repos
    assert (repository.repo_id, repository.repo_type) == ("org/name", "model")
    assert pull("org/name", config) == folder  # another --download-dir finds it, too


def test_a_newer_version_is_asked_for_where_that_is_wanted_and_only_what_changed_is_fetched(hub, config):
    hub.files["org/name"] = dict(FOLDER)
    old = pull("org/name", config)
    hub.files["org/name"]["config.json"] = b'{"architectures": ["Qwen2ForCausalLM"]}'
    hub.commit = "f" * 40
    assert pull("org/name", config) == old
    hub.requests.clear()
    new = pull("org/name", config, renewed=True)
    assert (new / "config.json").read_bytes() == hub.files["org/name"]["config.json"]
    assert [path.rpartition("/")[2] for path, _ in _content_requests(hub)] == ["config.json"]
    assert pull("org/name", config) == new


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/ggufs:Q4_K_M", "m-Q4_K_M.gguf"),
        ("org/ggufs:q4_k_m", "m-Q4_K_M.gguf"),
        ("org/ggufs", "m-Q4_K_M.gguf"),
        ("hf:org/ggufs:Q8_0", "m-Q8_0-00001-of-00002.gguf"),
        ("org/ggufs:m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
    ],
)
def test_a_gguf_is_chosen_by_its_quantisation_and_comes_with_all_its_parts(hub, config, name, file):
    hub.files["org/ggufs"] = GGUFS
    path = pull(name, config)
    assert path.name == file
    fetched = {path.rpartition("/")[2] for path, _ in _content_requests(hub)}
    parts = {each for each in GGUFS if each.split("-0000")[0] == file.split("-0000")[0]}
    assert fetched == parts | {"mmproj-m-f16.gguf"}
    assert (path.parent / "mmproj-m-f16.gguf").read_bytes() == GGUFS["mmproj-m-f16.gguf"]


PROJECTORS = [f"mmproj-{kind}.gguf" for kind in ("BF16", "F16", "F32", "Q8_0")]


@pytest.mark.parametrize(
    ("names", "settings", "expected"),
    [
        (PROJECTORS, {}, {"mmproj-F16.gguf"}),
        (["mmproj-F32.gguf", "mmproj-x-bf16.gguf"], {}, {"mmproj-x-bf16.gguf"}),
        (["mmproj-model.gguf", "mmproj-other.gguf"], {}, {"mmproj-model.gguf"}),
        (["other/mmproj-F16.gguf"], {}, set()),
        (PROJECTORS, {"language_model_only": True}, set()),
        (PROJECTORS, {"mmproj": "mine.gguf"}, set()),
    ],
)
def test_one_file_that_sees_comes_with_a_gguf_model_if_it_is_wanted(hub, config, names, settings, expected):
    hub.files["org/m"] = {"m-Q4_K_M.gguf": b"GGUF", **dict.fromkeys(names, b"GGUF eye")}
    path = pull("org/m", msgspec.structs.replace(config, **settings))
    assert path.name == "m-Q4_K_M.gguf"
    assert {name.rpartition("/")[2] for name, _ in _content_requests(hub)} - {path.name} == expected


def test_the_file_that_sees_is_fetched_later_to_a_model_that_came_without_it(hub, config):
    hub.files["org/m"] = {"m-Q4_K_M.gguf": b"GGUF", "mmproj-F16.gguf": b"GGUF eye"}
    path = pull("org/m", msgspec.structs.replace(config, language_model_only=True))
    assert pull("org/m", config) == path
    hub.requests.clear()
    assert pull("org/m", config, renewed=True) == path
    assert [name.rpartition("/")[2] for name, _ in _content_requests(hub)] == ["mmproj-F16.gguf"]
    assert path.with_name("mmproj-F16.gguf").read_bytes() == b"GGUF eye"


@pytest.mark.parametrize(
    ("model", "names", "expected"),
    [
        ("B-Q4_K_M.gguf", ["mmproj-A-f16.gguf", "mmproj-B-f16.gguf"], "mmproj-B-f16.gguf"),
        ("B-Q4_K_M.gguf", ["mmproj-A-f16.gguf", "mmproj-B-Q8_0.gguf"], "mmproj-B-Q8_0.gguf"),
        ("m-VL-3B-Q4_0.gguf", ["m-VL-3B-mmproj-f16.gguf", "m-VL-7B-mmproj-f16.gguf"], "m-VL-3B-mmproj-f16.gguf"),
        ("m-3B-Q8_0.gguf", ["mmproj-m-3B-f16.gguf", "mmproj-m-7B-Q8_0.gguf"], "mmproj-m-3B-f16.gguf"),
        ("m-VL-3B-Q4_0.gguf", ["m-VL-7B-mmproj-f16.gguf"], None),
        ("m-it-4B-qat-Q4_0.gguf", ["mmproj-m-it-4B-f16.gguf"], "mmproj-m-it-4B-f16.gguf"),
        ("m-30B-A3B-Q4_0.gguf", ["mmproj-m-30B-f16.gguf"], "mmproj-m-30B-f16.gguf"),
        ("m-Q4_0.gguf", ["mmproj-m-7B-F32.gguf"], "mmproj-m-7B-F32.gguf"),
        ("m-Q4_0.gguf", ["mmproj-F32.gguf", "mmproj-x-bf16.gguf"], "mmproj-x-bf16.gguf"),
        ("m-Q4_0.gguf", ["M.MMPROJ-F16.gguf"], "M.MMPROJ-F16.gguf"),
        ("m-Q4_0.gguf", ["unmmprojected-F16.gguf"], None),
    ],
)
def test_of_several_files_that_see_the_model_s_own_is_chosen_and_none_is_a_model(model, names, expected):
    assert ggufs.projector_for(model, [model, *names]) == expected
    others = sum("unmmprojected" in name for name in names)
    assert len(ggufs.groups([model, *names])) == 1 + others


def test_two_models_of_a_repository_each_find_their_own_file_that_sees_when_both_are_here(hub, config):
    models, eyes = ["A-Q4_0.gguf", "B-Q4_0.gguf"], ["mmproj-A-f16.gguf", "mmproj-B-f16.gguf"]
    hub.files["org/m"] = dict.fromkeys([*models, *eyes], b"GGUF")
    paths = [pull(f"org/m:{model}", config) for model in models]
    assert [path.name for path in paths] == models
    assert [[near.name for near in ggufs.projectors_next_to(path)] for path in paths] == [[eye] for eye in eyes]


def test_the_file_that_sees_is_not_fetched_where_no_picture_can_be_read_and_the_log_says_why(
    hub, config, caplog, monkeypatch
):
    hub.files["org/m"] = {"m-Q4_K_M.gguf": b"GGUF", "mmproj-F16.gguf": b"GGUF eye"}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        path = pull("org/m", config)
    assert {name.rpartition("/")[2] for name, _ in _content_requests(hub)} == {path.name}
    [message] = [record.getMessage() for record in caplog.records if record.name.endswith("hub")]
    assert message.startswith("org/m takes text only here: ")
    assert "vision" in message
    assert message.endswith("mmproj-F16.gguf is not fetched; after a fix, run tureen pull org/m")
    pull("org/m", config, renewed=True)
    assert path.with_name("mmproj-F16.gguf").is_file()


def test_a_model_in_a_folder_comes_with_the_file_that_sees_of_that_folder_or_of_the_top(hub, config):
    hub.files["org/m"] = {"Q8_0/m-Q8_0.gguf": b"GGUF", "Q4_0/m-Q4_0.gguf": b"G", "mmproj-F16.gguf": b"top"}
    hub.files["org/m"]["Q4_0/mmproj-F32.gguf"] = b"own"
    for tag, expected in (("Q8_0", "mmproj-F16.gguf"), ("Q4_0", "Q4_0/mmproj-F32.gguf")):
        hub.requests.clear()
        pull(f"org/m:{tag}", config)
        fetched = [path.partition("/resolve/")[2].partition("/")[2] for path, _ in _content_requests(hub)]
        assert fetched == [expected, f"{tag}/m-{tag}.gguf"]  # a pull that breaks off leaves no model without it


def test_a_quantisation_that_is_not_there_names_those_that_are(hub, config):
    hub.files["org/ggufs"] = GGUFS
    message = _fault("org/ggufs:Q4_K_S", config)
    assert "only Q4_K_M, Q8_0" in message
    assert "did you mean org/ggufs:Q4_K_M?" in message


def test_several_models_of_which_none_is_usual_must_be_named(hub, config):
    hub.files["org/ggufs"] = {"m-Q5_0.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF"}
    assert "name one: org/ggufs:Q5_0" in _fault("org/ggufs", config)


def test_a_repository_of_pickles_is_refused(hub, config):
    hub.files["org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    assert "pickled weights" in _fault("org/old", config)


def test_the_token_goes_to_the_hub_and_opens_what_is_private(hub, config, monkeypatch):
    hub.files["org/name"], hub.token = FOLDER, "secret"
    assert "set HF_TOKEN" in _fault("org/name", config)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "rejects your token (HF_TOKEN)" in _fault("org/name", config)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (pull("org/name", config) / "model.safetensors").read_bytes() == WEIGHTS


def test_the_token_is_not_sent_to_another_host_that_the_hub_points_to(hub, config, monkeypatch):
    elsewhere = Simulated()
    try:
        path = f"/org/name/resolve/{hub.commit}/m.gguf"
        hub.files["org/name"], hub.token = {"m.gguf": WEIGHTS}, "secret"
        elsewhere.files = hub.files
        hub.redirects[path] = elsewhere.url + path
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert pull("org/name", config).read_bytes() == WEIGHTS
        assert hub.authorizations[path] == "Bearer secret"
        assert elsewhere.authorizations == {path: None}
    finally:
        elsewhere.close()


@pytest.mark.parametrize(
    ("before", "after", "is_sent"),
    [
        ("https://a.example", "https://a.example", True),
        ("http://a.example", "https://a.example", True),
        ("https://a.example", "http://a.example", False),
        ("https://a.example", "https://b.example", False),
        ("https://a.example", "https://a.example:444", False),
    ],
)
def test_the_token_leaves_neither_its_host_nor_https(before, after, is_sent):
    request = urllib.request.Request(f"{before}/m.gguf", headers={"Authorization": "Bearer secret"})
    new = _SameHost().redirect_request(request, io.BytesIO(), 302, "Found", Message(), f"{after}/m.gguf")
    assert new is not None
    assert new.has_header("Authorization") == is_sent


@pytest.mark.parametrize(
    "change",
    [
        lambda files: [{**file, "rfilename": f"../../{file['rfilename']}"} for file in files],
        lambda files: [{**file, "rfilename": f"/tmp/{file['rfilename']}"} for file in files],
        lambda files: [{**file, "lfs": {**file["lfs"], "sha256": "../../../../evil"}} for file in files],
        lambda files: [{**file, "lfs": {**file["lfs"], "size": "9"}} for file in files],
        lambda files: [{**file, "lfs": None, "blobId": "../evil"} for file in files],
        lambda files: [7 for _ in files],
    ],
)
def test_a_hub_that_lies_about_names_writes_nowhere(hub, config, change):
    hub.files["org/name"], hub.change_siblings = {"m.gguf": WEIGHTS}, change
    _fault("org/name", config)
    assert [path for path in Path(config.download_dir).parent.rglob("*") if path.is_file()] == []


def test_the_token_of_a_log_in_is_used(hub, config, tmp_path):
    hub.files["org/name"], hub.token = FOLDER, "secret"
    place = tmp_path / "home" / ".cache" / "huggingface"
    place.mkdir(parents=True)
    (place / "token").write_text("secret\n")
    assert pull("org/name", config).is_dir()


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda hub: hub.gated.add("org/name"), ["gated", "accept its terms at", "HF_TOKEN"]),
        (lambda hub: hub.files.clear(), ["no such public repository", "check the name", "HF_TOKEN"]),
        (lambda hub: hub.status.update({"/api/models/org/name/revision/main": 503}), ["503", "try again later"]),
        (lambda hub: hub.status.update({"/api/models/org/name/revision/main": 429}), ["429", "try again later"]),
        (lambda hub: hub.close(), ["refuses connections", "--model-path", "HF_ENDPOINT"]),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_line_with_what_to_do(hub, config, prepare, words):
    hub.files["org/name"] = FOLDER
    prepare(hub)
    message = _fault("org/name", config)
    assert [word for word in words if word not in message] == []


def test_a_revision_that_is_not_there_is_named(hub, tmp_path):
    hub.files["org/name"] = FOLDER
    message = _fault("org/name", Config(download_dir=str(tmp_path), revision="v9"))
    assert "no revision 'v9'" in message


def test_a_connection_that_breaks_is_gone_on_with(hub, config):
    hub.files["org/name"] = FOLDER
    hub.cuts = [10**9, 10**9, 1_000_000, 3_000_000, 100]  # of config.json, of a pooling's, then of the weights
    folder = pull("org/name", config)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.num_sent == sum(len(FOLDER[path.relative_to(folder).as_posix()]) for path in folder.rglob("*.*"))


def test_a_server_without_ranges_is_asked_for_the_whole(hub, config):
    hub.files["org/name"], hub.has_ranges = FOLDER, False
    hub.cuts = [10**9, 10**9, 1_000_000]
    assert (pull("org/name", config) / "model.safetensors").read_bytes() == WEIGHTS


def test_content_that_is_not_the_listed_one_is_refused_and_not_kept(hub, config):
    class Lying(dict):
        def __getitem__(self, name):
            return super().__getitem__(name)

        def get(self, name, default=None):
            content = super().get(name, default)
            return content[:-1] + b"!" if name == "model.safetensors" else content

    hub.files["org/name"] = Lying(FOLDER)
    message = _fault("org/name", config)
    assert "damaged or replaced" in message
    kept = [path for path in Path(config.download_dir).rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert kept == []


def test_the_progress_is_in_bytes_of_all_files_and_ends_with_all(hub, config):
    hub.files["org/name"] = FOLDER
    told = []
    pull("org/name", config, lambda *told_now: told.append(told_now))
    total = sum(len(FOLDER[name]) for name in ("config.json", "tokenizer.json", "model.safetensors")) + 2
    assert {(phase, whole) for phase, _, whole in told} == {("download org/name (bytes)", total)}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] == total
    assert len(told) > 10


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(hub, config, monkeypatch):
    hub.files["org/name"] = FOLDER
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("", (), {"free": 1_000_000}))
    message = _fault("org/name", config)
    assert "it needs 10 MiB, but only 977 KiB are free" in message
    assert "tureen rm" in message
    assert [path for path, _ in _content_requests(hub) if path.endswith("safetensors")] == []


def test_a_disk_that_fills_up_meanwhile_is_said(hub, config, monkeypatch):
    hub.files["org/name"] = FOLDER
    real = os.fsync

    def full(descriptor):
        real(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "the disk is full; make room" in _fault("org/name", config)


def test_a_cache_that_cannot_be_written_is_said(hub, tmp_path):
    hub.files["org/name"] = FOLDER
    (tmp_path / "file").write_text("")
    assert "--download-dir" in _fault("org/name", Config(download_dir=str(tmp_path / "file")))


def test_a_proxy_is_used_and_its_fault_named_without_its_password(hub, config, monkeypatch):
    hub.files["org/name"] = FOLDER
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", hub.url.replace("//", "//user:secret@"))
    assert (pull("org/name", config) / "model.safetensors").read_bytes() == WEIGHTS
    config = Config(download_dir=config.download_dir + "2")
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    message = _fault("org/name", config)
    assert "the proxy http://127.0.0.1:9 (HTTPS_PROXY) for hub.invalid refuses connections" in message
    assert "secret" not in message


def test_a_name_that_no_server_has_says_that_there_is_no_network(hub, config, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    message = _fault("org/name", config)
    assert "hub.invalid does not resolve: no network" in message
    assert "hf download org/name" in message


SCRIPT = """
import sys
import termios
from tureen.config import Config
from tureen.fetching.names import parse
from tureen.fetching.pull import find_here, pull
print(pull(sys.argv[1], Config(download_dir=sys.argv[2]), lambda *told: print(*told, file=sys.stderr, flush=True)))
"""


def _start(name, config):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name, config.download_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_download_that_is_killed_is_gone_on_with_and_the_file_is_right(hub, config):
    hub.files["org/name"], hub.hold_after = {"m.gguf": WEIGHTS}, 5_000_000
    process = _start("org/name", config)
    hub.is_held.wait()
    part = Path(config.download_dir, "hub", "models--org--name", "blobs")
    wait_until(lambda: any(path.stat().st_size >= 4 << 20 for path in part.glob("*.part")), "the part on the disk")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.go_on.set()
    (had,) = [path.stat().st_size for path in part.glob("*.part")]
    assert 0 < had < len(WEIGHTS)
    hub.requests.clear()
    path = pull("org/name", config)
    assert path.read_bytes() == WEIGHTS
    assert _content_requests(hub) == [(f"/org/name/resolve/{hub.commit}/m.gguf", f"bytes={had}-")]
    assert list(part.glob("*.part")) == []


def test_of_two_processes_that_want_a_model_one_downloads_and_the_other_waits(hub, config):
    hub.files["org/name"], hub.hold_after = {"m.gguf": WEIGHTS}, 3_000_000
    first = _start("org/name", config)
    hub.is_held.wait()
    second = _start("org/name", config)
    assert "wait for another process that fetches org/name" in second.stderr.readline()
    hub.go_on.set()
    paths = [process.communicate()[0].strip() for process in (first, second)]
    assert paths[0] == paths[1]
    assert Path(paths[0]).read_bytes() == WEIGHTS
    assert len(_content_requests(hub)) == 1


def test_threads_that_want_a_model_at_once_all_get_it_and_it_is_sent_once(hub, config):
    hub.files["org/name"] = {"m.gguf": WEIGHTS}
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(pull("org/name", config))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 4
    assert hub.num_sent == len(WEIGHTS)


def test_the_index_of_a_folder_in_parts_names_what_is_missing(hub, config):
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    hub.files["org/name"] = {"config.json": b"{}", "model.safetensors.index.json": index, "model-1.safetensors": b"x"}
    assert "no complete model" in _fault("org/name", config)


def test_the_command_shows_a_bar_on_a_terminal_and_ends_with_the_path(hub, config):
    hub.files["org/name"], hub.hold_after = {"m.gguf": WEIGHTS}, 8_000_000
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-m", "tureen", "pull", "org/name", "--download-dir", config.download_dir]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"B/s" not in shown:
            shown += os.read(ours, 1 << 16)
        hub.go_on.set()
        while True:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # the command has ended
                break
    os.close(ours)
    assert process.returncode == 0
    assert "/9.77MiB" in shown.decode()
    assert " left" in shown.decode()
    assert str(find_here(parse("org/name"), config)) in shown.decode().replace("\r\n", "")
    assert "tureen serve --model org/name" in shown.decode()


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _shown(name, config, capsys):
    assert cli.main(["show", name, "--download-dir", config.download_dir]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "yes: LlamaForCausalLM, safetensors"),
        ({"architectures": ["MambaForCausalLM"]}, "no: architecture 'MambaForCausalLM' is not supported; --model-impl"),
        ({"num_attention_heads": None}, "no: config.json: num_attention_heads: is missing"),
    ],
)
def test_show_says_of_a_folder_on_the_hub_whether_it_runs(hub, config, capsys, changes, verdict):
    hub.files["org/m"] = FOLDER | {"config.json": json.dumps(LLAMA | changes).encode()}
    shown = _shown("org/m", config, capsys)
    assert f"runs         {verdict}" in shown
    assert shown.startswith("name         org/m\n")
    assert not any("safetensors" in path for path in _content_requests(hub))
    assert find_here(parse("org/m"), config) is None


def test_show_says_of_a_gguf_file_on_the_hub_whether_it_runs_and_fits(hub, config, capsys, tmp_path):
    model = tiny_models.write(tmp_path / "hf", "llama")
    for name, changes in (("m-Q4_K_M", {}), ("m-Q8_0", {"tokenizer.ggml.pre": "of tomorrow"})):
        path = tiny_gguf.write_from_transformers(tmp_path / f"{name}.gguf", model, changes)
        hub.files.setdefault("org/m", {})[path.name] = path.read_bytes()
    shown = _shown("org/m", config, capsys)
    assert "runs         yes: LlamaForCausalLM, gguf" in shown
    assert "it fits" in shown
    assert shown.startswith("name         org/m:Q4_K_M\n")  # as `tureen list` has it after the download
    assert "runs         no: tokenizer.ggml.pre 'of tomorrow' is not known" in _shown("org/m:Q8_0", config, capsys)


def test_show_says_of_a_gguf_pair_on_the_hub_and_here_that_it_takes_pictures(hub, config, capsys, tmp_path):
    oracle = tiny_qwen_vl.write(tmp_path / "hf", "qwen2.5")
    path = write_pair(tmp_path / "gguf", oracle, tiny_qwen_vl.PREPROCESSOR, {"<|image_pad|>": tiny_qwen_vl.IMAGE})
    hub.files["org/m"] = {each.name: each.read_bytes() for each in path.parent.iterdir()}
    shown = _shown("org/m:tiny.gguf", config, capsys)
    assert "runs         yes: Qwen2_5_VLForConditionalGeneration, gguf" in shown
    more = "those of requests that have not ended take up to 3.0 GiB more"
    assert f"pictures     yes, with mmproj-tiny-f32.gguf; {more}\n" in shown
    assert "pictures     yes, with mmproj-tiny-f32.gguf" in _shown(str(path), config, capsys)
    (path.parent / "mmproj-other.gguf").write_bytes(b"")
    assert "pictures     no: tiny.gguf takes text only: several mmproj files" in _shown(str(path), config, capsys)


def test_show_asks_only_for_the_head_of_a_gguf_file(hub, config, capsys, monkeypatch):
    hub.files["org/m"] = {"m.gguf": b"GGUF" + bytes(1 << 20)}
    monkeypatch.setattr(hub_module, "HEAD_BYTES", 64)
    assert "runs         no: " in _shown("org/m", config, capsys)
    assert [asked for path, asked in hub.requests if path.endswith("m.gguf")] == ["bytes=0-63"]


def test_show_says_why_a_model_on_the_hub_is_not_known(hub, config, capsys, monkeypatch):
    assert "runs         not known: model org/none: the hub has no such public repository" in _shown(
        "org/none", config, capsys
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids access to the hub" in _shown("org/none", config, capsys)
