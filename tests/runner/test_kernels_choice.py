"""Which kernels run a model, and what is said where that is not as asked."""

import json
import logging

import pytest
from runner_driver import folder_source
from tiny_models import write

from tureen.config import Config
from tureen.contract.runner import Batch, Row
from tureen.errors import StartupError
from tureen.kernels.cpu import native
from tureen.runner.load import load_runner
from tureen.runner.torch_forward import TorchForward


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write(folder, "llama")
    return folder


def _load(folder, **settings):
    return load_runner(folder_source(folder), Config(device="cpu", max_total_tokens=1024, **settings))


def _break(*_):
    raise RuntimeError("TUREEN_CPU_ISA is avx1024")


def test_native_kernels_that_cannot_run_end_the_start_with_the_way_out(folder, monkeypatch):
    monkeypatch.setattr(native, "load", _break)
    with pytest.raises(StartupError, match=r"avx1024; use --kernels torch"):
        _load(folder)
    assert isinstance(_load(folder, kernels="torch").forward, TorchForward)


def test_a_type_that_only_torch_has_is_computed_by_torch_with_a_warning(folder, caplog):
    with caplog.at_level(logging.WARNING):
        assert isinstance(_load(folder, dtype="float16").forward, TorchForward)
    assert "several times slower" in caplog.text
    with pytest.raises(StartupError, match=r"--kernels native: .*float16"):
        _load(folder, dtype="float16", kernels="native")


def test_an_installation_without_native_kernels_computes_with_torch_and_says_how_to_get_them(
    folder, monkeypatch, caplog
):
    monkeypatch.setattr(native, "load", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(_load(folder).forward, TorchForward)
    assert "apt-get install g++" in caplog.text
    with pytest.raises(StartupError, match="compiler"):
        _load(folder, kernels="native")


def test_heads_too_large_for_the_native_kernels_are_refused_by_name(folder, tmp_path):
    pytest.importorskip("tureen.kernels.cpu._native")
    config = json.loads((folder / "config.json").read_text()) | {"head_dim": 640}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"head_dim is 640, not 2 … 576; use --kernels torch"):
        _load(tmp_path)


@pytest.mark.parametrize(("page_size", "is_told"), [(16, False), (32, False), (10, True)])
def test_page_sizes_that_waste_memory_are_told(folder, caplog, page_size, is_told):
    pytest.importorskip("tureen.kernels.cpu._native")
    with caplog.at_level(logging.WARNING):
        _load(folder, page_size=page_size)
    assert (f"--page-size {page_size}: a multiple of 16" in caplog.text) is is_told


def test_a_tape_refuses_tokens_and_pages_that_are_not_there(folder):
    pytest.importorskip("tureen.kernels.cpu._native")
    forward = _load(folder, kernels="native").forward
    with pytest.raises(ValueError, match="last step"):
        forward._tape.score([0])
    forward.run(Batch((Row(0, (1, 2, 3), 0, (0,), True),)))
    with pytest.raises(ValueError, match="last step"):
        forward._tape.score([3])
    with pytest.raises(ValueError, match="last step"):
        forward._tape.last_hidden([-1])
    for row in (Row(0, (256,), 0, (0,), True), Row(0, (1,), 0, (64,), True), Row(0, (1,), 16, (0,), True)):
        with pytest.raises(ValueError, match=r"vocabulary|KV cache|pages"):
            forward.run(Batch((row,)))
