"""A conversation with the real model comes back after a restart: the same tokens, of pages on the disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, metric

GUARDS = ("tiers", "cache", "storage", "replicas")


PROMPT = "The Amazon is a river in South America. " * 12 + "Its mouth lies in"


def _ask(server: ServerProcess, text: str = PROMPT, **fields):
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 12}, **fields}
    answer = httpx.post(f"{server.url}/generate", json=body).raise_for_status().json()
    info = answer["meta_info"]
    return answer["text"], info["cached_tokens"], info["prompt_tokens"]


def _pages(folder: Path) -> list[Path]:
    return [path for path in (folder / "pages").rglob("*") if path.is_file() and path.name != "usage"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, default_model_source) -> Path:
    return tmp_path_factory.mktemp("kept") / "kv"


@pytest.fixture(scope="module")
def first(folder) -> str:
    with ServerProcess("--kv-disk", str(folder)) as server:
        text, num_cached, _ = _ask(server.wait_ready())
        assert num_cached == 0
    return text


def test_a_prompt_comes_back_after_a_restart_and_a_damaged_page_is_computed(folder, first):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}
    with ServerProcess("--kv-disk", str(folder)) as server:
        text, num_cached, num_prompt = _ask(server.wait_ready())
        assert text == first
        assert num_prompt - 16 <= num_cached < num_prompt
        assert metric(server.url, "sglang:kv_disk_loaded_pages_total") == num_cached // 16
        assert _ask(server, cache_salt="another")[:2] == (first, 0)
        [model] = httpx.get(f"{server.url}/status").json()["models"]
        assert model["kv_disk"]["total_loaded"] == num_cached // 16
    for path in _pages(folder):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with ServerProcess("--kv-disk", str(folder)) as server:
        assert _ask(server.wait_ready())[:2] == (first, 0)
        assert metric(server.url, "sglang:kv_disk_damaged_pages_total") == 1


@pytest.mark.parametrize(
    "other", [("--kv-cache-dtype", "int8"), ("--activations", "int8"), ("--page-size", "32"), ("--dtype", "bfloat16")]
)
def test_pages_of_other_settings_are_not_found(folder, first, other):
    with ServerProcess("--kv-disk", str(folder), *other) as server:
        assert _ask(server.wait_ready())[1] == 0


def test_whatever_a_killed_server_has_written_can_be_used(tmp_path, first):
    with ServerProcess("--kv-disk", str(tmp_path / "kv")) as server:
        assert _ask(server.wait_ready())[0] == first
        os.kill(server.process.pid, 9)
    with ServerProcess("--kv-disk", str(tmp_path / "kv")) as server:
        assert _ask(server.wait_ready())[0] == first


def test_replicas_share_what_they_keep(tmp_path, first):
    both = ("--kv-disk", str(tmp_path / "kv"), "--replicas", "2")
    with ServerProcess(*both) as server:
        assert _ask(server.wait_ready())[0] == first
    with ServerProcess(*both) as server:
        server.wait_ready()
        for drained in ("0", "1"):  # each replica finds it
            httpx.post(f"{server.url}/replicas/drain", json={"replica": int(drained)}).raise_for_status()
            text, num_cached, num_prompt = _ask(server)
            assert (text, num_cached >= num_prompt - 16) == (first, True)
            httpx.post(f"{server.url}/replicas/undrain", json={"replica": int(drained)}).raise_for_status()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--disable-radix-cache",), "--kv-disk needs the prefix cache"),
        (("--kv-disk-size", "1000"), "less than one page"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(tmp_path, default_model_source, flags, message):
    server = ServerProcess("--kv-disk", str(tmp_path / "kv"), *flags)
    assert server.process.wait() != 0
    server.stop()
    assert message in server.output


def test_a_folder_that_others_may_read_is_refused(tmp_path, default_model_source):
    (tmp_path / "kv").mkdir(mode=0o755)
    server = ServerProcess("--kv-disk", str(tmp_path / "kv"))
    assert server.process.wait() != 0
    server.stop()
    assert "chmod 700" in server.output
