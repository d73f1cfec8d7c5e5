"""A conversation with the real model comes back after a restart: the same tokens, of pages on the disk."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

import tureen

GUARDS = ("kv_offload", "cache", "storage", "data_parallel")


PROMPT = "The Amazon is a river in South America. " * 12 + "Its mouth lies in"
PARAMS = {"temperature": 0, "max_new_tokens": 12}


def _engine(folder: Path, **settings) -> tureen.Engine:
    """Start an engine in this process: it keeps pages as a server does."""
    return tureen.Engine(engine="thread", num_threads=1, kv_disk=str(folder), **settings)


def _asked(engine: tureen.Engine, **fields):
    return _facts(engine.generate(PROMPT, PARAMS, **fields))


def _ask(server: ServerProcess):
    body = {"text": PROMPT, "sampling_params": PARAMS}
    return _facts(httpx.post(f"{server.url}/generate", json=body).raise_for_status().json())


def _facts(answer: dict) -> tuple[str, int, int]:
    info = answer["meta_info"]
    return answer["text"], info["cached_tokens"], info["prompt_tokens"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, default_model_source) -> Path:
    return tmp_path_factory.mktemp("kept") / "kv"


@pytest.fixture(scope="module")
def first(folder) -> str:
    with _engine(folder) as engine:
        text, num_cached, _ = _asked(engine)
        assert num_cached == 0
    return text


@pytest.mark.parametrize(
    "other",
    [{"kv_cache_dtype": "int8"}, {"activations": "int8"}, {"page_size": 32}, {"dtype": "bfloat16"}],
    ids=lambda other: next(iter(other)),
)
def test_pages_of_other_settings_are_not_found(folder, first, other):
    with _engine(folder, **other) as engine:
        assert _asked(engine)[1] == 0


def test_a_prompt_comes_back_after_a_restart_and_a_damaged_page_is_computed(folder, first, tmp_path):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}
    with _engine(folder) as engine:
        text, num_cached, num_prompt = _asked(engine)
        assert text == first
        assert num_prompt - 16 <= num_cached < num_prompt
        assert _asked(engine, cache_salt="another")[:2] == (first, 0)
    damaged = shutil.copytree(folder, tmp_path / "kv")
    for path in (damaged / "pages").rglob("*"):
        if path.is_file() and path.name != "usage":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    with _engine(damaged) as engine:
        assert _asked(engine)[:2] == (first, 0)


def test_whatever_a_killed_server_has_written_can_be_used(tmp_path, first):
    with ServerProcess("--kv-disk", str(tmp_path / "kv")) as server:
        assert _ask(server.wait_ready())[0] == first
        os.kill(server.process.pid, 9)
    with _engine(tmp_path / "kv") as engine:
        assert _asked(engine)[0] == first


def test_replicas_share_what_they_keep(folder, first):
    """Each finds what an engine without replicas has kept."""
    with ServerProcess("--kv-disk", str(folder), "--replicas", "2") as server:
        server.wait_ready()
        for drained in ("0", "1"):
            httpx.post(f"{server.url}/replicas/drain", json={"replica": int(drained)}).raise_for_status()
            text, num_cached, num_prompt = _ask(server)
            assert (text, num_cached >= num_prompt - 16) == (first, True)
            httpx.post(f"{server.url}/replicas/undrain", json={"replica": int(drained)}).raise_for_status()
