"""A conversation with the real model comes back after a restart: the same tokens, of pages on the disk."""

from __future__ import annotations

import stat

import httpx
from server_process import ServerProcess, metric

PROMPT = "The Amazon is a river in South America. " * 12 + "Its mouth lies in"


def ask(server: ServerProcess, **fields: object) -> tuple[str, int, int]:
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 12}, **fields}
    answer = httpx.post(f"{server.url}/generate", json=body).raise_for_status().json()
    return answer["text"], answer["meta_info"]["cached_tokens"], answer["meta_info"]["prompt_tokens"]


def test_a_prompt_comes_back_after_a_restart_for_this_user_and_salt_alone(tmp_path, default_model_source):
    folder = tmp_path / "kv"
    with ServerProcess("--kv-disk", str(folder)) as server:
        first, num_cached, _ = ask(server.wait_ready())
        assert num_cached == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}
    with ServerProcess("--kv-disk", str(folder)) as server:
        text, num_cached, num_prompt = ask(server.wait_ready())
        assert text == first
        assert num_prompt - 16 <= num_cached < num_prompt
        assert metric(server.url, "sglang:kv_disk_loaded_pages_total") == num_cached // 16
        assert ask(server, cache_salt="another")[:2] == (first, 0)
        [model] = httpx.get(f"{server.url}/status").json()["models"]
        assert model["kv_disk"]["total_loaded"] == num_cached // 16
