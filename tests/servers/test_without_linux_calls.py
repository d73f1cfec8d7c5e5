"""A server on a system that lacks what only Linux has: it is simulated by taking the calls away from real processes."""

from __future__ import annotations

import textwrap

import httpx
import pytest
from server_process import ServerProcess
from timeouts import PATIENCE_S

TAKEN_AWAY = """
    import os, platform, signal, socket, sys

    for module, names in (
        (os, ("memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "posix_fadvise")),
        (signal, ("pidfd_send_signal",)),
        (socket, ("SOCK_SEQPACKET", "SO_PEERCRED")),
    ):
        for name in names:
            delattr(module, name)
    platform.machine = lambda: "arm64"
    stat = os.stat

    def refuse(path):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))

    def hide(event, arguments):
        if event in ("open", "os.listdir", "os.scandir"):
            refuse(arguments[0])

    def stat_elsewhere(path, *more, **how):
        refuse(path)
        return stat(path, *more, **how)

    os.stat = stat_elsewhere
    sys.addaudithook(hide)
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(TAKEN_AWAY))
    return {"PYTHONPATH": str(folder)}


def test_text_is_generated_and_what_needs_helpers_is_refused_with_the_reason(elsewhere, default_model_source):
    with ServerProcess(str(default_model_source.path), env=elsewhere) as running:
        running.wait_ready()

        def generate(**params) -> httpx.Response:
            body = {
                "text": "The capital of France is",
                "sampling_params": {"temperature": 0, "max_new_tokens": 4} | params,
            }
            return httpx.post(f"{running.url}/generate", json=body, timeout=PATIENCE_S)

        assert "Paris" in generate().json()["text"]
        refused = generate(regex="[a-z]+")
        assert refused.status_code == 400
        assert "regex: it needs helper processes, which this system lacks (memfd_create" in refused.text
        assert running.stop() == 0
        assert "Traceback" not in running.output
        assert "constrained outputs are refused" in running.output


def test_code_of_clients_is_refused_at_the_start(elsewhere, default_model_source):
    with ServerProcess(str(default_model_source.path), "--enable-custom-logit-processor", env=elsewhere) as running:
        assert running.process.wait(PATIENCE_S) != 0
    assert "--enable-custom-logit-processor needs Linux on x86-64 or aarch64" in running.output
    assert "Traceback" not in running.output
