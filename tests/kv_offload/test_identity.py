"""The digest of what computes is of the weights in memory, whatever happens to their files meanwhile."""

from __future__ import annotations

import os
import shutil

import pytest
from real_app import write_model
from runner_driver import folder_source

from tureen.config import Config
from tureen.errors import Conflict
from tureen.kernels.cpu import native
from tureen.kv_offload.identity import FileDigests, Identity
from tureen.runner.load import load_runner

pytestmark = pytest.mark.skipif(native.load() is None, reason="no native kernels")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    for name, seed in (("red", 1), ("blue", 2)):
        write_model(root / name, seed)
    return root


@pytest.fixture
def folder(models, tmp_path):
    return shutil.copytree(models / "red", tmp_path / "mine")


def _load(folder, **settings):
    return load_runner(folder_source(folder), Config(device="cpu", max_total_tokens=512, num_threads=1, **settings))


def _identity(runner, tmp_path):
    return Identity(lambda: runner.call("kv_facts"), [b"a"], FileDigests(tmp_path / "digests.json"))


def _update(runner, folder):
    source = folder_source(folder)
    runner.call("update_weights", name=source.name, path=str(source.path), format=source.format, load_format=None)


def _overwrite(folder, other):
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")


def test_equal_weights_have_one_digest_and_others_another(models, folder, tmp_path):
    digests = [_identity(_load(path), tmp_path).now() for path in (folder, models / "red", models / "blue")]
    assert digests[0] == digests[1] != digests[2]


def test_files_that_are_overwritten_change_the_digest_when_they_are_loaded_and_not_before(models, folder, tmp_path):
    runner = _load(folder)
    identity = _identity(runner, tmp_path)
    red = identity.now()
    _overwrite(folder, models / "blue")
    assert identity.now() == red
    _update(runner, folder)
    assert identity.now() == _identity(_load(models / "blue"), tmp_path).now() != red
    _update(runner, models / "red")
    assert identity.now() == red


def test_nothing_is_read_where_no_weights_were_loaded(folder, tmp_path, monkeypatch):
    identity = _identity(_load(folder), tmp_path)
    before = identity.now()
    monkeypatch.setattr(FileDigests, "of", None)
    assert identity.now() == before


@pytest.mark.parametrize("what", ["overwritten", "gone", "no more a file", "a pipe"])
def test_weights_whose_files_changed_before_they_were_looked_at_share_with_nobody(models, folder, tmp_path, what):
    runner = _load(folder)
    weights = folder / "model.safetensors"
    if what == "overwritten":
        _overwrite(folder, models / "blue")
    elif what == "gone":
        shutil.rmtree(folder)
    else:
        weights.unlink()
        weights.mkdir() if what == "no more a file" else os.mkfifo(weights)
    identity = _identity(runner, tmp_path)
    others = {_identity(each, tmp_path).now() for each in (runner, _load(models / "red"), _load(models / "blue"))}
    assert len(others | {identity.now()}) == 4
    assert identity.now() == identity.now()


def test_files_that_change_while_they_are_hashed_are_not_trusted(models, folder, tmp_path, monkeypatch):
    runner, of = _load(folder), FileDigests.of

    def changing(self, paths):
        paths = list(paths)
        contents = of(self, paths)
        if folder / "model.safetensors" in paths:
            _overwrite(folder, models / "blue")
        return contents

    monkeypatch.setattr(FileDigests, "of", changing)
    assert _identity(runner, tmp_path).now() != _identity(_load(models / "red"), tmp_path).now()


def test_a_folder_that_is_removed_after_each_load_tells_its_weights_apart(models, folder, tmp_path):
    runner = _load(folder)
    identity = _identity(runner, tmp_path)
    seen = [identity.now()]
    for name in ("blue", "red"):
        shutil.rmtree(folder)
        assert identity.now() == seen[-1]
        shutil.copytree(models / name, folder)
        _update(runner, folder)
        if name == "blue":
            shutil.rmtree(folder)
        seen.append(identity.now())
        folder.mkdir(exist_ok=True)
    assert seen[2] == seen[0] != seen[1]
    assert seen[1] != _identity(_load(models / "blue"), tmp_path).now()


def test_weights_without_files_need_none(folder, tmp_path):
    runner = _load(folder, load_format="dummy")
    shutil.rmtree(folder)
    assert _identity(runner, tmp_path).now() == _identity(runner, tmp_path).now()


def test_files_that_change_while_weights_come_back_are_not_taken(models, folder, monkeypatch):
    runner = _load(folder)
    runner.call("release_memory", tags=["weights"])
    load = runner._parts._factory.load

    def changing(source, config):
        weights = load(source, config)
        _overwrite(folder, models / "blue")
        return weights

    monkeypatch.setattr(runner._parts._factory, "load", changing)
    with pytest.raises(Conflict, match="have changed"):
        runner.call("resume_memory", tags=["weights"])
    assert runner._parts._weights is None
