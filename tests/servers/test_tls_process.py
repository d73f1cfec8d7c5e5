"""`tureen serve` with TLS and keys: what it prints, what SIGHUP does to it."""

from __future__ import annotations

import re
import signal
import ssl

import httpx
from server_process import ServerProcess
from throwaway_ca import Authority
from timeouts import PATIENCE_S, wait_until

KEY, ADMIN_KEY, PASSWORD = "user-k3y-7", "admin-k3y-7", "passw0rd-7"


def secret(path, content: str) -> str:
    path.write_text(content)
    path.chmod(0o600)
    return str(path)


def test_with_tls_and_keys_it_shows_https_and_no_secret_and_survives_the_signal(default_model_source, tmp_path):
    ca = Authority(tmp_path)
    own, alice = ca.issue("server", for_server=True, password=PASSWORD), ca.issue("alice")
    arguments = ["--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", ca.cert, "--tls-crl", ca.revoke()]
    arguments += ["--tls-key-password-file", secret(tmp_path / "password", PASSWORD)]
    with ServerProcess(*arguments, env={"TUREEN_API_KEY": KEY, "TUREEN_ADMIN_API_KEY": ADMIN_KEY}) as server:
        wait_until(lambda: "load" in server.output or "ready at" in server.output, "the loading")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "curl " in server.output or server.process.poll() is not None, "the start")
        (url,) = re.findall(r"ready at (https://\S+)", server.output)
        assert f"curl {url}/generate --cacert CA.pem --cert CLIENT.pem --key CLIENT.key.pem -H 'Auth" in server.output
        context = ssl.create_default_context(cafile=ca.cert)
        context.load_cert_chain(*alice)
        with httpx.Client(verify=context, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S) as client:
            body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
            before = client.post(f"{url}/generate", json=body).json()["text"]
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "were reloaded" in server.output, "the reload")
            assert client.post(f"{url}/generate", json=body).json()["text"] == before
            assert client.get(f"{url}/server_info").json()["api_key"] is None
        assert server.stop() == 0
        assert "POST /generate 200" in server.output
        assert "by alice" in server.output
        for word in (KEY, ADMIN_KEY, PASSWORD, "Traceback"):
            assert word not in server.output
