"""New certificates, lists and keys are taken while the server runs; what runs goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import uvloop
from app_under_test import LiveServer, parse_events
from throwaway_ca import EXPIRED, Authority, Pair
from timeouts import PATIENCE_S, wait_until

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
LONG = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 1500}}


class Files:
    """The files the server reads, which a test replaces; alice's and bob's certificates."""

    def __init__(self, folder: Path) -> None:
        self.ca = Authority(folder)
        self.alice, self.bob = self.ca.issue("alice"), self.ca.issue("bob")
        (folder / "live").mkdir()
        self.live = Pair(str(folder / "live/cert.pem"), str(folder / "live/key.pem"))
        self.live_ca, self.live_crl = str(folder / "live/ca.pem"), str(folder / "live/crl.pem")
        self.put(self.ca, self.ca.issue("server", for_server=True), self.ca.revoke())

    def put(self, ca: Authority, server: Pair, crl: str) -> None:
        for source, target in zip((ca.cert, *server, crl), (self.live_ca, *self.live, self.live_crl), strict=True):
            shutil.copy(source, target)

    def revoke(self, *pairs: Pair) -> None:
        shutil.copy(self.ca.revoke(*pairs, name="new-crl"), self.live_crl)

    def settings(self):
        return {"tls_cert": self.live.cert, "tls_key": self.live.key, "tls_ca": self.live_ca, "tls_crl": self.live_crl}

    def client(self, pair: Pair) -> httpx.Client:
        context = ssl.create_default_context(cafile=self.ca.cert)
        context.load_cert_chain(*pair)
        return httpx.Client(verify=context, timeout=PATIENCE_S)

    def status(self, server: LiveServer, pair: Pair) -> int:
        with self.client(pair) as client:
            return client.get(f"{server.url}/health").status_code


@pytest.fixture
def make_files(tmp_path):
    """Make files of an authority of their own."""

    def make() -> Files:
        folder = tmp_path / f"files-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return Files(folder)

    return make


@pytest.mark.usefixtures("long_kept")
def test_a_reload_shuts_out_a_revoked_client_and_leaves_everything_that_runs(make_files):
    for loop in LOOPS.values():
        is_revoked_while_streams_go_on(make_files(), loop)
    an_idle_connection_of_a_revoked_client_is_closed(make_files())
    a_request_that_is_on_its_way_is_answered_and_is_the_last_of_its_connection(make_files())
    a_session_from_before_a_reload_is_not_resumed(make_files())
    no_client_fails_while_certificates_are_read_again_and_again(make_files())


def is_revoked_while_streams_go_on(files: Files, loop):
    with LiveServer(slow=True, loop=loop, **files.settings()) as server, files.client(files.alice) as alice:
        with alice.stream("POST", f"{server.url}/generate", json=LONG) as running:
            lines = running.iter_lines()
            next(lines)
            files.revoke(files.alice)
            server.hang_up()
            assert server.stats.num_running == 1
            with pytest.raises(httpx.TransportError):
                files.status(server, files.alice)
            assert files.status(server, files.bob) == 200
            assert server.stats.num_running == 1
            server.hurry()
            rest = "\n".join(lines)
        last = parse_events(rest.lstrip() + "\n")[-1]
        assert last["meta_info"]["completion_tokens"] == 1500
        with pytest.raises(httpx.TransportError):  # the connection of the stream has ended with it
            alice.get(f"{server.url}/health")


@pytest.fixture
def long_kept(monkeypatch):
    """That it is idle does not close a connection, however slow the machine is."""
    monkeypatch.setattr("tureen.http.server.KEEP_ALIVE_S", 10 * PATIENCE_S)


def an_idle_connection_of_a_revoked_client_is_closed(files: Files):
    with LiveServer(**files.settings()) as server:
        context = ssl.create_default_context(cafile=files.ca.cert)
        context.load_cert_chain(*files.alice)
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        with context.wrap_socket(plain, server_hostname="localhost") as kept:
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert kept.recv(1000).startswith(b"HTTP/1.1 200")
            server.hang_up()
            assert kept.recv(1000) == b""


def a_request_that_is_on_its_way_is_answered_and_is_the_last_of_its_connection(files: Files):
    with LiveServer(**files.settings()) as server:
        context = ssl.create_default_context(cafile=files.ca.cert)
        context.load_cert_chain(*files.alice)
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        with context.wrap_socket(plain, server_hostname="localhost") as kept:
            kept.sendall(b"GET /health HT")
            wait_until(lambda: any(one._framing_bytes for one in connections(server)), "the arrival")
            server.hang_up()
            kept.sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
            assert kept.recv(1000).startswith(b"HTTP/1.1 200")
            assert kept.recv(1000) == b""


def connections(server: LiveServer):
    return list(server._server.server_state.connections)


def test_new_certificates_and_keys_are_used_after_a_reload_and_bad_ones_change_nothing(make_files, tmp_path, caplog):
    new_certificate_and_ca_take_the_place_of_the_old(make_files(), tmp_path)
    with_a_bad_new_file_the_old_ones_stay_and_the_log_names_it(make_files(), caplog)
    keys_are_read_again(tmp_path, caplog)


def new_certificate_and_ca_take_the_place_of_the_old(files: Files, tmp_path):
    (tmp_path / "new").mkdir()
    new = Authority(tmp_path / "new", "new-ca")
    dave = new.issue("dave")
    with LiveServer(**files.settings()) as server:
        files.put(new, new.issue("new-server", for_server=True), new.revoke())
        server.hang_up()
        context = ssl.create_default_context(cafile=new.cert)
        context.load_cert_chain(*dave)
        assert httpx.get(f"{server.url}/health", verify=context).status_code == 200
        context.load_cert_chain(*files.alice)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", verify=context)
        with pytest.raises(httpx.ConnectError, match=r"self-signed|self signed|verify failed"):
            files.status(server, files.alice)


BAD_FILES = ("cert", "key", "ca", "crl", "expired", "gone")


def with_a_bad_new_file_the_old_ones_stay_and_the_log_names_it(files: Files, caplog):
    with LiveServer(**files.settings()) as server:
        for file in BAD_FILES:
            good = {name: Path(path).read_bytes() for name, path in files.settings().items()}
            caplog.clear()
            path = spoilt(files, file)
            with caplog.at_level("ERROR"):
                server.hang_up()
            errors = [record.getMessage() for record in caplog.records]
            assert len(errors) == 1, (file, errors)
            assert str(path) in errors[0], file
            assert "stay unchanged" in errors[0], file
            assert files.status(server, files.alice) == 200, file
            for name, content in good.items():
                Path(files.settings()[name]).write_bytes(content)


def spoilt(files: Files, file: str) -> Path:
    """Put a bad file in place of a good one. Return its path."""
    bad = {"cert": files.live.cert, "key": files.live.key, "ca": files.live_ca, "crl": files.live_crl}
    path = Path(bad.get(file, files.live.cert))
    if file == "expired":
        shutil.copy(files.ca.issue("old", valid=EXPIRED, for_server=True).cert, path)
    elif file == "gone":
        path.unlink()
    else:
        path.write_text("-----BEGIN NONSENSE-----\n")
    return path


def a_session_from_before_a_reload_is_not_resumed(files: Files):
    with LiveServer(**files.settings()) as server:
        context = ssl.create_default_context(cafile=files.ca.cert)
        context.load_cert_chain(*files.alice)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        with context.wrap_socket(plain, server_hostname="localhost") as first:
            session = first.session
        files.revoke(files.alice)
        server.hang_up()
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(plain, server_hostname="localhost", session=session)
        plain.close()


def no_client_fails_while_certificates_are_read_again_and_again(files: Files):
    with LiveServer(**files.settings()) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        num_done, is_over = [0, 0], threading.Event()

        def keep_asking(who: int, pair: Pair) -> list[int]:
            statuses = []
            while not is_over.is_set():
                statuses.append(files.status(server, pair))  # a connection of its own
                num_done[who] += 1
            return statuses

        asking = [pool.submit(keep_asking, who, pair) for who, pair in enumerate((files.alice, files.bob))]
        try:
            for count in range(1, 11):
                server.hang_up()
                wait_until(lambda count=count: min(num_done) > count, "answers")
        finally:
            is_over.set()
        assert {status for one in asking for status in one.result()} == {200}


def keys_are_read_again(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("alice k1\nbob k2\n")
    path.chmod(0o600)
    with LiveServer(api_key_file=str(path)) as server:

        def status(key: str) -> int:
            return httpx.get(f"{server.url}/version", headers={"authorization": f"Bearer {key}"}).status_code

        assert [status(key) for key in ("k1", "k2", "k3")] == [200, 200, 401]
        path.write_text("bob k2\ncarol k3\n")
        server.hang_up()
        wait_until(lambda: status("k1") == 401, "the end of k1")
        assert [status(key) for key in ("k1", "k2", "k3")] == [401, 200, 200]
        path.write_text("")
        server.hang_up()
        wait_until(lambda: "stay unchanged" in caplog.text, "the complaint")
        assert [status(key) for key in ("k1", "k2", "k3")] == [401, 200, 200]


ALONE = """
import asyncio, sys, uvloop
from app_under_test import EngineMaker, LiveServer, make_engine
from tureen.config import Config

server = object.__new__(LiveServer)
server.config = Config(port=0, **eval(sys.argv[2]))
server._maker = EngineMaker(make_engine, server.config)


class Up:
    def set(self):
        print(server.port, flush=True)


server._is_up = Up()
server._run(uvloop.new_event_loop if sys.argv[1] == "uvloop" else asyncio.new_event_loop)
"""


def test_the_signal_itself_reloads_and_never_ends_the_process(make_files):
    for name, with_tls in (("uvloop", True), ("asyncio", False)):
        reload_by_signal(make_files(), name, with_tls)


def reload_by_signal(files: Files, name: str, with_tls: bool) -> None:
    settings = files.settings() if with_tls else {}
    command = [sys.executable, "-c", ALONE, name, repr(settings)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        port = int(process.stdout.readline())
        url = f"https://localhost:{port}" if with_tls else f"http://127.0.0.1:{port}"

        def is_open(pair: Pair) -> bool:
            try:
                with files.client(pair) as client:
                    return client.get(f"{url}/health").status_code == 200
            except httpx.TransportError:
                return False

        assert is_open(files.alice)
        files.revoke(files.alice)
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        if with_tls:
            wait_until(lambda: not is_open(files.alice), "the reload")
        assert is_open(files.bob)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
