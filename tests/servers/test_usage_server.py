"""What clients used is on the disk when the server says so: a killed server's successor knows it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess

ADMIN = {"authorization": "Bearer ADMIN"}


@pytest.mark.usefixtures("default_model_source")
def test_what_was_written_survives_kill_9(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ada KEY-ADA\n")
    keys.chmod(0o600)
    flags = ["--api-key-file", str(keys), "--admin-api-key", "ADMIN", "--usage-db", str(tmp_path / "usage.db")]
    body = {"text": "Paris is", "sampling_params": {"max_new_tokens": 8}}

    def report(server: ServerProcess) -> dict[str, Any]:
        return httpx.get(f"{server.url}/usage", headers=ADMIN, timeout=PATIENCE_S).json()

    with ServerProcess(*flags) as server:
        server.wait_ready()
        for _ in range(2):
            headers = {"authorization": "Bearer KEY-ADA"}
            answer = httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == 200
        wait_until(lambda: report(server)["unwritten_requests"] == 0, "it is written")
        before = report(server)["clients"]
        server.process.kill()
        server.process.wait()
    with ServerProcess(*flags) as server:
        server.wait_ready()
        assert report(server)["clients"] == before
        assert before[0]["requests"] == 2
