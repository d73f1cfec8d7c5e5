"""HTTPS and client certificates against real clients: who gets in, who gets not one byte of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import warnings
from pathlib import Path

import httpx
import pytest
from app_under_test import LiveServer, parse_events
from cryptography import x509
from cryptography.x509.oid import NameOID
from throwaway_ca import EXPIRED, FUTURE, Authority, Pair
from timeouts import PATIENCE_S, wait_until

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class World:
    """One authority, its server's pair, and clients of every kind."""

    def __init__(self, folder) -> None:
        self.ca = Authority(folder)
        self.server = self.ca.issue("server", for_server=True)
        self.alice = self.ca.issue("alice")
        self.revoked = self.ca.issue("revoked")
        (folder / "other").mkdir()
        other = Authority(folder / "other")  # of the same name
        self.refused = {
            "no certificate": None,
            "another CA's": other.issue("stranger"),
            "expired": self.ca.issue("expired", valid=EXPIRED),
            "not yet valid": self.ca.issue("future", valid=FUTURE),
            "revoked": self.revoked,
            "a server's": self.ca.issue("another-server", for_server=True),
            "by a client": Authority(folder / "other", "fake", issuer=self.ca).issue("grandchild"),
        }
        self.crl = self.ca.revoke(self.revoked)

    def settings(self, **more):
        settings = {"tls_cert": self.server.cert, "tls_key": self.server.key, "tls_ca": self.ca.cert}
        return settings | {"tls_crl": self.crl} | more

    def context(self, pair: Pair | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca.cert)
        if pair is not None:
            context.load_cert_chain(*pair)
        return context

    def get(self, server: LiveServer, path: str, pair: Pair | None = None, **how) -> httpx.Response:
        with httpx.Client(verify=self.context(pair)) as client:
            return client.get(server.url + path, **how)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def servers(world: World):
    """Want a client certificate. By the name of their event loop."""
    with (
        LiveServer(**world.settings()) as first,
        LiveServer(loop=asyncio.new_event_loop, **world.settings()) as second,
    ):
        yield {"uvloop": first, "asyncio": second}


def exchange(server: LiveServer, context: ssl.SSLContext) -> tuple[bytes, str]:
    """What the server says to a plain GET /health, and the TLS version."""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as wrapped,
    ):
        wrapped.sendall(REQUEST)
        return wrapped.recv(100), wrapped.version()


def refusal(server: LiveServer, context: ssl.SSLContext) -> str:
    """Return the error of a client that gets no byte of HTTP. Empty if it gets some."""
    try:
        exchange(server, context)
    except (ssl.SSLError, ConnectionError) as error:
        return str(error) or repr(error)
    return ""


def test_a_client_with_a_certificate_of_the_ca_gets_in_and_no_other_gets_a_byte_of_http(servers, world: World):
    a_client_with_a_certificate_of_the_ca_gets_in(servers, world)
    another_certificate_gets_no_byte_of_http(servers, world)
    plain_http_gets_no_answer_on_a_tls_port(servers["uvloop"])


def a_client_with_a_certificate_of_the_ca_gets_in(servers, world: World):
    for server in servers.values():
        with httpx.Client(verify=world.context(world.alice)) as client:
            url = f"{server.url}/generate"
            assert client.post(url, json={"text": "say:hi"}).json()["text"] == "hi"
            events = parse_events(client.post(url, json={"text": "say:hi", "stream": True}).text)
            assert events[-1]["text"] == "hi"


def another_certificate_gets_no_byte_of_http(servers, world: World):
    let_in = []
    for kind, pair in world.refused.items():
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = world.context(pair)
            context.minimum_version = context.maximum_version = version
            let_in += [(kind, version, loop) for loop, server in servers.items() if not refusal(server, context)]
    assert let_in == []


def test_old_versions_weak_ciphers_and_tickets_are_refused_and_the_newest_version_can_be_demanded(
    servers, world: World
):
    an_old_tls_version_is_not_spoken(servers, world)
    a_weak_cipher_is_not_taken(servers, world)
    both_versions_are_spoken_and_the_newer_can_be_demanded(servers["uvloop"], world)
    no_ticket_is_given_so_that_each_connection_proves_its_certificate(servers["uvloop"], world)


def an_old_tls_version_is_not_spoken(servers, world: World):
    for version in ("TLSv1", "TLSv1_1"):
        context = world.context(world.alice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        context.set_ciphers("ALL:@SECLEVEL=0")
        for loop, server in servers.items():
            said = refusal(server, context)
            assert re.search(r"(?i)protocol.version|EOF occurred", said), (version, loop, said)


def a_weak_cipher_is_not_taken(servers, world: World):
    taken = []
    for ciphers in ("AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-SHA", "NULL"):
        context = world.context(world.alice)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(f"{ciphers}:@SECLEVEL=0")
        taken += [(ciphers, loop) for loop, server in servers.items() if not refusal(server, context)]
    assert taken == []


def both_versions_are_spoken_and_the_newer_can_be_demanded(strict: LiveServer, world: World):
    context = world.context(world.alice)
    assert exchange(strict, context)[1] == "TLSv1.3"
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    answer, version = exchange(strict, context)
    assert (answer[:15], version) == (b"HTTP/1.1 200 OK", "TLSv1.2")
    with LiveServer(**world.settings(tls_min_version="1.3")) as server:
        with pytest.raises(ssl.SSLError):
            exchange(server, context)
        assert exchange(server, world.context(world.alice))[0].startswith(b"HTTP/1.1 200")


def no_ticket_is_given_so_that_each_connection_proves_its_certificate(strict: LiveServer, world: World):
    context = world.context(world.alice)
    for _ in range(2):
        plain = socket.create_connection(("127.0.0.1", strict.port), timeout=PATIENCE_S)
        with context.wrap_socket(plain, server_hostname="localhost") as wrapped:
            wrapped.sendall(REQUEST)
            assert wrapped.recv(100).startswith(b"HTTP/1.1 200")
            assert wrapped.version() == "TLSv1.3"
            assert wrapped.session is None or not wrapped.session.has_ticket


def plain_http_gets_no_answer_on_a_tls_port(strict: LiveServer):
    with socket.create_connection(("127.0.0.1", strict.port), timeout=PATIENCE_S) as plain:
        plain.sendall(REQUEST)
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(1000)


def test_each_setting_of_certificates_and_keys_has_its_effect(world: World, tmp_path):
    an_optional_certificate_may_be_missing_but_not_wrong_and_without_client_auth_none_is_asked_for(world)
    an_encrypted_key_opens_with_the_password_of_a_file(world, tmp_path)
    a_client_of_an_intermediate_ca_gets_in_when_every_ca_has_its_list(world, tmp_path)


def an_optional_certificate_may_be_missing_but_not_wrong_and_without_client_auth_none_is_asked_for(world):
    with LiveServer(**world.settings(tls_client_auth="optional")) as server:
        assert world.get(server, "/health").status_code == 200
        assert world.get(server, "/health", world.alice).status_code == 200
        for kind in ("another CA's", "expired", "revoked"):
            with pytest.raises(httpx.TransportError):
                world.get(server, "/health", world.refused[kind])
    for settings in (world.settings(tls_ca=None, tls_crl=None), world.settings(tls_client_auth="none")):
        with LiveServer(**settings) as server:
            assert world.get(server, "/health").status_code == 200
            assert world.get(server, "/health", world.revoked).status_code == 200


def an_encrypted_key_opens_with_the_password_of_a_file(world: World, tmp_path):
    pair = world.ca.issue("encrypted", for_server=True, password="pässword 1")
    password = tmp_path / "password"
    password.write_text("pässword 1\n")
    password.chmod(0o600)
    settings = world.settings(tls_cert=pair.cert, tls_key=pair.key, tls_key_password_file=str(password))
    with LiveServer(**settings) as server:
        assert world.get(server, "/health", world.alice).status_code == 200


def a_client_of_an_intermediate_ca_gets_in_when_every_ca_has_its_list(world: World, tmp_path):
    middle = Authority(tmp_path, "middle", issuer=world.ca)
    carol, mallory = middle.issue("carol"), middle.issue("mallory")
    lists, authorities = tmp_path / "lists.pem", tmp_path / "authorities.pem"
    texts = [Path(path).read_text() for path in (world.crl, middle.revoke(mallory))]
    lists.write_text("".join(texts))
    authorities.write_text(Path(world.ca.cert).read_text() + Path(middle.cert).read_text())
    with LiveServer(**world.settings(tls_ca=str(authorities), tls_crl=str(lists))) as server:
        for pair in (carol, world.alice):
            assert world.get(server, "/health", pair).status_code == 200
        for pair in (mallory, world.revoked):
            with pytest.raises(httpx.TransportError):
                world.get(server, "/health", pair)
    lists.write_text(Path(world.ca.revoke(middle, name="crl2")).read_text() + Path(middle.revoke()).read_text())
    with LiveServer(**world.settings(tls_ca=str(authorities), tls_crl=str(lists))) as server:
        assert world.get(server, "/health", world.alice).status_code == 200
        with pytest.raises(httpx.TransportError):
            world.get(server, "/health", carol)


PROGRAMS = ("curl", "openssl")


@pytest.mark.skipif(None in map(shutil.which, PROGRAMS), reason="needs curl and openssl")
def test_the_page_s_curl_line_works_and_openssl_s_own_client_is_served(servers, world: World):
    the_page_s_curl_line_works(servers["uvloop"], world)
    openssl_s_own_client_is_served(servers["uvloop"], world)


def the_page_s_curl_line_works(strict: LiveServer, world: World):
    command = ["curl", "-sS", "-H", "Accept: application/json", "-H", "Content-type: application/json"]
    command += ["--cacert", world.ca.cert, "--cert", world.alice.cert, "--key", world.alice.key]
    command += ["-X", "POST", "-d", '{"text": "say:Olivier"}', f"{strict.url}/generate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert json.loads(done.stdout)["text"] == "Olivier"
    without = [word for word in command if word not in ("--cert", world.alice.cert, "--key", world.alice.key)]
    refused = subprocess.run(without, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert refused.returncode != 0
    assert refused.stdout == ""


def openssl_s_own_client_is_served(strict: LiveServer, world: World):
    address = f"localhost:{strict.port}"
    for version in ("-tls1_2", "-tls1_3"):
        command = ["openssl", "s_client", "-connect", address, "-CAfile", world.ca.cert, "-verify_return_error"]
        command += [version, "-cert", world.alice.cert, "-key", world.alice.key, "-ign_eof"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, input=REQUEST.decode(), check=False
        )
        assert "Verify return code: 0 (ok)" in done.stdout, version
        assert "HTTP/1.1 200 OK" in done.stdout, version


def test_the_name_in_the_certificate_is_the_client_s_in_the_log_and_for_limits(servers, world: World, caplog):
    the_name_in_the_certificate_and_no_other_is_in_the_access_log(servers["uvloop"], world, caplog)
    a_hostile_name_in_a_certificate_stays_on_its_line(servers["uvloop"], world, caplog)
    each_client_s_limit_is_by_its_certificate(world)


def the_name_in_the_certificate_and_no_other_is_in_the_access_log(strict: LiveServer, world: World, caplog):
    with caplog.at_level("INFO", "tureen.http"):
        chosen = {"client_name": "eve", "x-client-name": "eve"}
        assert world.get(strict, "/v1/models", world.alice, headers=chosen).status_code == 200
        wait_until(lambda: "/v1/models" in caplog.text, "the line in the log")
    lines = [record.getMessage() for record in caplog.records if "/v1/models" in record.getMessage()]
    assert [line.endswith(" by alice") for line in lines] == [True]
    assert "eve" not in caplog.text


def each_client_s_limit_is_by_its_certificate(world: World):
    bob = world.ca.issue("bob")
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 1900}}
    with LiveServer(slow=True, max_client_requests=1, **world.settings()) as server:
        url = f"{server.url}/generate"
        with (
            httpx.Client(verify=world.context(world.alice)) as alice,
            httpx.Client(verify=world.context(bob)) as bobs,
            alice.stream("POST", url, json=body) as running,
        ):
            assert running.status_code == 200
            assert alice.post(url, json={"text": "say:a"}).status_code == 429
            assert bobs.post(url, json={"text": "say:a"}).status_code == 200


def a_hostile_name_in_a_certificate_stays_on_its_line(strict: LiveServer, world: World, caplog):
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "eve\n12:00:00 INFO forged")])
    pair = world.ca.issue("eve", subject=subject)
    with caplog.at_level("INFO", "tureen.http"):
        assert world.get(strict, "/version", pair).status_code == 200
        wait_until(lambda: "by eve" in caplog.text, "the line in the log")
    lines = [record.getMessage() for record in caplog.records if "eve" in record.getMessage()]
    assert [line.count("\n") for line in lines] == [0]
