"""T21, T22: nothing but a picture of an allowed, public host is fetched, and that in bounds."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import threading

import pytest
from PIL import Image
from stored_pictures import stored
from throwaway_ca import Authority
from timeouts import PATIENCE_S

from tureen.errors import Forbidden, InvalidRequest, StartupError
from tureen.media.fetch import Fetcher, is_public

HOST = "images.example.com"
PUBLIC = "93.184.216.34"
OTHER_PUBLIC = "2606:2800:220:1::1"
PICTURE = stored(Image.new("RGB", (8, 8), "blue"))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(PICTURE) + PICTURE


@pytest.fixture(autouse=True)
def patient_fetcher(monkeypatch):
    """Hosts get all the time that they need, but where a test says otherwise."""
    monkeypatch.setattr("tureen.media.fetch.TIMEOUT_S", PATIENCE_S)


class Remote:
    """A host of the internet, in a thread. `answer(connection)` is called with each connection, one after the other."""

    port = 8080

    def __init__(self, answer, tls=None):
        self.requests = []
        self.num_connections = 0
        self._answer = answer
        self._tls = tls
        self._threads = []

    def dial(self):
        """The fetcher's end of a connection."""
        ours, theirs = socket.socketpair()
        self.num_connections += 1
        self._threads.append(threading.Thread(target=self._serve, args=(theirs,)))
        self._threads[-1].start()
        return ours

    def _serve(self, connection):
        with contextlib.suppress(OSError):
            connection.settimeout(30)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                self.requests.append(connection.recv(65536))
                self._answer(connection)
        connection.close()

    def close(self):
        for thread in self._threads:
            thread.join()


@pytest.fixture
def remote():
    """Starts hosts that answer with these bytes, or as a function does."""
    running = []

    def start(answer, tls=None):
        reply = answer if callable(answer) else lambda connection: connection.sendall(answer)
        running.append(Remote(reply, tls))
        return running[-1]

    yield start
    for one in running:
        one.close()


class Internet:
    """A resolver and a connector: every host has these addresses, in turn; all of them are one local server."""

    def __init__(self, server=None, *answers):
        self._answers = list(answers or ([PUBLIC],))
        self._server = server
        self.looked_up = []
        self.dialled = []

    async def resolve(self, host, port):
        self.looked_up.append((host, port))
        return self._answers.pop(0)

    async def connect(self, address, port, tls, host):
        self.dialled.append((address, port))
        if self._server is None:
            raise ConnectionRefusedError
        return await asyncio.open_connection(sock=self._server.dial(), ssl=tls, server_hostname=host if tls else None)


def fetch(internet, url=f"http://{HOST}/a.png", domains=(HOST,)):
    fetcher = Fetcher(domains, resolve=internet.resolve, connect=internet.connect)
    return asyncio.run(fetcher.fetch(url, "image_data[1]"))


def refused(internet, error=InvalidRequest, **options):
    with pytest.raises(error) as caught:
        fetch(internet, **options)
    assert caught.value.field == "image_data[1]"
    assert caught.value.code == ("media_fetch_failed" if error is InvalidRequest else "media_url_forbidden")
    assert len(caught.value.message) < 400
    return caught.value.message


def test_a_picture_of_an_allowed_host_is_fetched_with_a_plain_request(remote):
    server = remote(GOOD)
    internet = Internet(server)
    assert fetch(internet, f"http://{HOST.upper()}/a%20b.png?size=1&x=[2]#part") == PICTURE
    assert internet.looked_up == [(HOST, 80)]
    assert internet.dialled == [(PUBLIC, 80)]
    [request] = server.requests
    lines = request.decode().split("\r\n")
    assert lines[0] == "GET /a%20b.png?size=1&x=[2] HTTP/1.1"
    assert f"Host: {HOST}" in lines
    assert "Accept-Encoding: identity" in lines
    assert not any(line.lower().startswith(("cookie", "authorization", "referer")) for line in lines)


@pytest.mark.parametrize(
    ("url", "port", "line", "host"),
    [
        (f"http://{HOST}", 80, "GET / ", HOST),
        (f"http://{HOST}:80/", 80, "GET / ", HOST),
        (f"http://{HOST}:443/a", 443, "GET /a ", f"{HOST}:443"),
        (f"http://{HOST}?a=b", 80, "GET /?a=b ", HOST),
    ],
)
def test_port_and_path_are_those_of_the_url(remote, url, port, line, host):
    server = remote(GOOD)
    internet = Internet(server)
    assert fetch(internet, url) == PICTURE
    assert internet.dialled == [(PUBLIC, port)]
    [request] = server.requests
    assert request.decode().startswith(line)
    assert f"\r\nHost: {host}\r\n" in request.decode()


LOCAL = [
    "127.0.0.1", "127.8.9.1", "10.0.0.1", "172.16.3.4", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "0.1.2.3",
    "192.0.0.8", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "::ffff:93.184.216.34", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2001:db8::1",
    "2001::1",
    "2002:7f00:1::", "3fff::1", "5f00::1", "100::1", "4000::1", "localhost", "", "127.1", "2130706433", "0x7f000001",
    "0177.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("address", LOCAL)
def test_an_address_that_is_not_public_is_never_dialled(address):
    assert not is_public(address)
    internet = Internet(None, [PUBLIC, address])
    assert "not public" in refused(internet, Forbidden)
    assert internet.dialled == []


@pytest.mark.parametrize("address", [PUBLIC, OTHER_PUBLIC, "8.8.8.8", "2a00:1450:4001::200e"])
def test_public_addresses_are_told_from_others(address):
    assert is_public(address)


def test_a_name_that_changes_its_address_is_looked_up_once_and_that_address_is_dialled(remote):
    internet = Internet(remote(GOOD), [PUBLIC], ["127.0.0.1"], ["127.0.0.1"])
    assert fetch(internet) == PICTURE
    assert internet.looked_up == [(HOST, 80)]
    assert internet.dialled == [(PUBLIC, 80)]


def test_the_next_address_is_tried_where_one_takes_no_connection():
    internet = Internet(None, [OTHER_PUBLIC, PUBLIC])
    assert "cannot be reached" in refused(internet)
    assert internet.dialled == [(OTHER_PUBLIC, 80), (PUBLIC, 80)]


TRICKS = [
    "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://localhost/", "http://[::1]:{port}/",
    "http://[::1]/",
    "http://0.0.0.0/", "http://0/", "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://127.1/",
    "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://169.254.169.254/latest/meta-data/",
    "http://10.0.0.1/",
    "http://user@{host}/", "http://user:pw@{host}/", "http://{host}@127.0.0.1:{port}/",
    "http://{host}:80@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@{host}/", "http://{host}\\@127.0.0.1:{port}/", "http://{host}\\.evil.com/",
    "http://{host}/\\",
    "http://{host}:{port}/", "http://{host}:22/", "http://{host}:8080/", "http://{host}:0/", "http://{host}:/",
    "http://{host}:80:80/",
    "http://{host}.evil.com/", "http://evil{host}/", "http://evil.com/{host}", "http://evil.com?{host}",
    "http://evil.com#{host}",
    "http://sub.{host}/", "http://{host}./", "http://.{host}/", "http://{host}%00.evil.com/",
    "http://{host}%2f@evil.com/",
    "http://{host} /", "http://{host}/a b", "http://{host}/\r\nX: y", "http://{host}/\n", "http://{host}\t/",
    "http://{host}/\0",
    "http://{host}/ü", "http://images。example。com/", "http://ｉmages.example.com/", "http:///{host}/",
    "http:////{host}/",
    "http://", "http://?", "https://[{host}]/", "http://{host};@evil.com/", "http://{host}&@evil.com/",
    "HTTP://EVIL.COM/",
    "http://{host}/" + "a" * 9000,
]  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS, ids=range(len(TRICKS)))
def test_no_url_but_a_plain_one_of_an_allowed_host_gets_as_far_as_a_look_up(trick, remote):
    canary = remote(GOOD)
    internet = Internet(canary)
    refused(internet, Forbidden, url=trick.format(host=HOST, port=canary.port))
    assert internet.looked_up == internet.dialled == []
    assert canary.num_connections == 0


def test_with_the_real_resolver_an_allowed_name_of_this_machine_is_not_connected_to(remote):
    canary = remote(GOOD)
    for url in (f"http://localhost:{canary.port}/", "http://localhost/", "https://localhost/"):
        with pytest.raises(Forbidden) as error:
            asyncio.run(Fetcher(("localhost",)).fetch(url, "image_data"))
        assert error.value.code == "media_url_forbidden"
    assert canary.num_connections == 0


def test_without_the_setting_no_url_is_fetched_whatever_the_modality(make_studio, remote, monkeypatch):
    canary = remote(GOOD)
    monkeypatch.setattr("tureen.media.fetch.look_up", lambda *_: pytest.fail("it looked"))
    studio = make_studio()
    for url in (f"http://127.0.0.1:{canary.port}/", f"http://{HOST}/a.png", "https://8.8.8.8/"):
        for modality in ("image", "multi-images", "video"):
            with pytest.raises(Forbidden) as error:
                studio.load(url, modality=modality)
            assert error.value.code == "media_url_forbidden"
    assert canary.num_connections == 0


def test_one_forbidden_url_among_many_is_found_before_anything_is_fetched(make_studio, monkeypatch):
    internet = Internet()
    monkeypatch.setattr(
        "tureen.media.loader.Fetcher", lambda names: Fetcher(names, resolve=internet.resolve, connect=internet.connect)
    )
    with pytest.raises(Forbidden) as error:
        make_studio(allowed_domains=(HOST,)).load(f"http://{HOST}/a.png", "http://evil.com/")
    assert error.value.field == "image_data[1]"
    assert internet.looked_up == []


def test_a_fetched_picture_comes_out_as_pixels(make_studio, monkeypatch, remote):
    internet = Internet(remote(GOOD))
    monkeypatch.setattr(
        "tureen.media.loader.Fetcher", lambda names: Fetcher(names, resolve=internet.resolve, connect=internet.connect)
    )
    [prepared] = make_studio(allowed_domains=(HOST,)).load(f"http://{HOST}/a.png")
    assert (prepared.pixels == [0, 0, 255]).all()


def chunked(data, size=1000):
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(PICTURE),
        HEAD + b"\r\n" + PICTURE,
        HEAD + b"Content-Encoding: identity\r\nContent-Length: %d\r\n\r\n" % len(PICTURE) + PICTURE,
        GOOD + b"more than was announced",
    ],
)
def test_every_way_to_end_a_body_is_understood(remote, answer):
    assert fetch(Internet(remote(answer))) == PICTURE


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n", "redirects"),
        (b"HTTP/1.1 301 Moved\r\nLocation: /b.png\r\nContent-Length: 0\r\n\r\n", "redirects"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "HTTP 404"),
        (b"HTTP/1.1 206 Partial\r\nContent-Length: 0\r\n\r\n", "HTTP 206"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "HTTP"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" + GOOD, "its host sends data after"),
        (GOOD + GOOD, "sends data after the picture"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(1 << 20)), "compresses"),
        (HEAD + b"Content-Length: 500\r\n\r\nshort", "too early"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nshort", "too early"),
        (HEAD, "too early"),
        (b"", "too early"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not answer with HTTP"),
        (b"\0" * 100, "not answer with HTTP"),
    ],
)
def test_another_answer_than_a_picture_is_a_failure_with_its_reason(remote, answer, why):
    server = remote(answer)
    assert why in refused(Internet(server))
    assert server.num_connections == 1


def endless(head, piece):
    """Sends until nobody listens any more."""

    def answer(connection):
        connection.sendall(head)
        while True:
            connection.sendall(piece)

    return answer


@pytest.mark.parametrize(
    ("head", "piece", "why"),
    [
        (HEAD + b"\r\n", bytes(1 << 20), "20 MiB"),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", bytes(1 << 20), "20 MiB"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + bytes(1 << 20) + b"\r\n", "20 MiB"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10000, "in addition"),
        (HEAD, b"X-More: and more\r\n" * 1000, "in addition"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a" * 10000, "in addition"),
    ],
)
def test_an_answer_without_end_is_cut_off(remote, head, piece, why):
    assert why in refused(Internet(remote(endless(head, piece))))


def test_a_host_that_sends_a_byte_at_a_time_gets_no_more_than_the_time_for_all(remote, monkeypatch):
    monkeypatch.setattr("tureen.media.fetch.TIMEOUT_S", 0.3)
    gone = threading.Event()

    def drip(connection):
        try:
            for byte in GOOD:
                connection.sendall(bytes([byte]))
                threading.Event().wait(0.05)
        finally:
            gone.set()

    assert "within" in refused(Internet(remote(drip)))
    assert gone.wait(PATIENCE_S)


def test_a_host_that_says_nothing_and_one_that_is_never_found_take_no_longer(remote, monkeypatch):
    monkeypatch.setattr("tureen.media.fetch.TIMEOUT_S", 0.1)
    internet = Internet(remote(lambda connection: connection.recv(1)))
    assert "within" in refused(internet)

    async def never(host, port):
        await asyncio.Event().wait()

    internet.resolve = never
    assert "within" in refused(internet)


def test_a_name_that_is_not_found_is_a_failure():
    async def unknown(host, port):
        raise socket.gaierror("no such name")

    internet = Internet()
    internet.resolve = unknown
    assert "cannot be reached" in refused(internet)
    assert "cannot be reached" in refused(Internet(None, []))


@pytest.fixture
def tls(tmp_path, monkeypatch):
    """A server's context, for the name `localhost`, of an authority that this process believes."""
    authority = Authority(tmp_path)
    pair = authority.issue("server", for_server=True)
    monkeypatch.setenv("SSL_CERT_FILE", authority.cert)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    return context


def test_https_is_verified_against_the_name_of_the_host(remote, tls, monkeypatch):
    server = remote(GOOD, tls)
    internet = Internet(server)
    assert fetch(internet, "https://localhost/a.png", ("localhost",)) == PICTURE
    assert internet.dialled == [(PUBLIC, 443)]
    assert "certificate" in refused(Internet(server), url=f"https://{HOST}/a.png")
    monkeypatch.delenv("SSL_CERT_FILE")
    assert "certificate" in refused(Internet(server), url="https://localhost/a.png", domains=("localhost",))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "name",
    ["", "http://example.com", "example.com:443", "example.com/", "*.example.com", "*", ".example.com", "example.com.",
     "10.0.0.1", "127.1", "2130706433", "0x7f000001", "::1", "[::1]", "a b", "exämple.com", "a" * 300,
     "user@example.com"],
)  # fmt: skip
def test_a_domain_that_is_no_name_of_a_host_ends_the_start(name):
    with pytest.raises(StartupError, match="--allowed-media-domain"):
        Fetcher(("example.com", name))


def test_the_case_of_a_domain_does_not_count(remote):
    assert fetch(Internet(remote(GOOD)), domains=("Images.EXAMPLE.com",)) == PICTURE
