"""Over real sockets: clients that leave, read slowly or pipeline; the server that drains."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import itertools
import json
import re
import socket
import struct

import httpx
import pytest
import requests
from app_under_test import LiveServer, parse_events, parse_metrics
from patience import PATIENCE_S, wait_until

LONG = {"max_new_tokens": 1900}
RST_ON_CLOSE = struct.pack("ii", 1, 0)

# as the documentation of SGLang's /generate shows it, but for the port
PLAIN_CLIENT = """
import requests

response = requests.post(
    "http://localhost:30000/generate",
    json={
        "text": "say: Paris. It is a city of 2 million.",
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 32,
        },
    },
)
print(response.json())
"""
STREAMING_CLIENT = """
import requests, json

response = requests.post(
    "http://localhost:30000/generate",
    json={
        "text": "say: Paris. It is a city of 2 million.",
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 32,
        },
        "stream": True,
    },
    stream=True,
)

prev = 0
for chunk in response.iter_lines(decode_unicode=False):
    chunk = chunk.decode("utf-8")
    if chunk and chunk.startswith("data:"):
        if chunk == "data: [DONE]":
            break
        data = json.loads(chunk[5:].strip("\\n"))
        output = data["text"].strip()
        print(output[prev:], end="", flush=True)
        prev = len(output)
print("")
"""


@pytest.fixture(scope="module")
def server():
    with LiveServer(slow=True) as running:
        yield running


def head(path: str = "/generate", length: int = 0, method: str = "POST", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Content-Length: {length}"] + [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def message(path: str = "/generate", **body) -> bytes:
    content = json.dumps(body).encode()
    return head(path, len(content)) + content


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def read_responses(connection: socket.socket, count: int) -> list[tuple[int, dict, bytes]]:
    """(status, headers, body) of `count` responses with a content length."""
    with connection.makefile("rb") as stream:
        return [read_response(stream) for _ in range(count)]


def read_response(stream) -> tuple[int, dict, bytes]:
    status = int(stream.readline().split()[1])
    headers = {}
    while (line := stream.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, stream.read(int(headers["content-length"]))


def run_client(server: LiveServer, code: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("http://localhost:30000", server.url), {})
    return printed.getvalue()


def connections(server: LiveServer):
    return list(server._server.server_state.connections)


def check_idle(server: LiveServer) -> None:
    def is_idle() -> bool:
        stats = server.stats
        is_free = stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        return is_free and not stats.num_running and not stats.num_queued and not server.app.state.server.num_running

    wait_until(is_idle, "the end of all requests")


def test_the_documented_clients_work_word_for_word(server):
    printed = run_client(server, STREAMING_CLIENT)
    assert printed.strip() == "Paris. It is a city of 2 millio"  # 32 tokens
    answer = eval(run_client(server, PLAIN_CLIENT), {})  # noqa: S307 - a dictionary that we printed
    assert answer["text"].strip() == printed.strip()
    requests_and_httpx_read_the_same_stream(server)


def requests_and_httpx_read_the_same_stream(server):
    body = {"text": "say:héllo 🙂", "stream": True}
    by_httpx = parse_events(httpx.post(f"{server.url}/generate", json=body).text)
    with requests.post(f"{server.url}/generate", json=body, stream=True) as response:
        response.encoding = "utf-8"
        lines = [line for line in response.iter_lines(decode_unicode=True) if line]
    assert json.loads(lines[-2].removeprefix("data: "))["text"] == by_httpx[-1]["text"] == "héllo 🙂"


def test_a_client_that_leaves_while_its_request_runs_frees_its_place(server):
    for stream, reset, text in itertools.product((True, False), (True, False), ("abc", ["abc", "abd"])):
        leave_while_it_runs(server, stream, reset, {"text": text})


def leave_while_it_runs(server, stream, reset, body):
    """reset: close the connection by RST instead of FIN."""
    before = server.metric("num_aborted_requests_total")
    count = 2 if isinstance(body["text"], list) else 1
    with connect(server) as connection:
        connection.sendall(message(**body, stream=stream, sampling_params=LONG))
        wait_until(lambda: server.stats.num_running == count, "the start")
        if stream:
            assert connection.recv(1000)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST_ON_CLOSE)
    check_idle(server)
    wait_until(lambda: server.metric("num_aborted_requests_total") == before + count, "they are counted")


def test_a_client_that_leaves_while_its_request_waits_is_taken_from_the_queue(server):
    for stream in (True, False):
        leave_while_it_waits(server, stream)


def leave_while_it_waits(server, stream):
    before = server.metric("num_aborted_requests_total")
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connect(server)) for _ in range(16)]
        for connection in busy:
            connection.sendall(message(text="abc", sampling_params=LONG))
        wait_until(lambda: server.stats.num_running >= 2, "the start")
        with connect(server) as connection:
            connection.sendall(message(text=["abd"] * 100, stream=stream, sampling_params=LONG))
            wait_until(lambda: server.stats.num_queued >= 90, "the queue")
        wait_until(lambda: server.metric("num_aborted_requests_total") == before + 100, "the end of what waited")
        wait_until(lambda: server.stats.num_queued < 10, "an empty queue")
    check_idle(server)


def num_gone(server: LiveServer) -> float:
    """Answers whose client left."""
    return parse_metrics(httpx.get(f"{server.url}/metrics").text).get("http_responses_total[499]", 0)


def test_a_client_that_left_is_in_the_log_and_the_metrics_as_that_with_the_tokens_that_were_made_for_it(server, caplog):
    caplog.set_level("INFO", logger="tureen.http")
    for stream in (True, False):
        caplog.clear()
        leave_and_be_noted(server, caplog, stream)
    a_stream_that_was_read_to_its_end_is_no_client_that_left(server, caplog)


def leave_and_be_noted(server, caplog, stream):
    gone, made = num_gone(server), server.metric("generation_tokens_total")
    before = server.stats.total_output_tokens
    with connect(server) as connection:
        connection.sendall(message(text="abc", stream=stream, sampling_params=LONG))
        wait_until(lambda: server.stats.total_output_tokens >= before + 5, "some tokens")
    wait_until(lambda: num_gone(server) == gone + 1, "the note")
    check_idle(server)
    (line,) = [record.getMessage() for record in caplog.records if "client gone" in record.getMessage()]
    num_tokens = int(re.search(r" /generate client gone after (\d+) tokens, \d+ ms", line)[1])
    assert 0 < num_tokens < LONG["max_new_tokens"]
    assert num_tokens <= server.metric("generation_tokens_total") - made


def a_stream_that_was_read_to_its_end_is_no_client_that_left(server, caplog):
    caplog.clear()
    gone = num_gone(server)
    body = {"text": "say:abc", "stream": True}
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 200
    check_idle(server)
    assert num_gone(server) == gone
    assert "client gone" not in caplog.text


def test_a_client_that_leaves_in_the_middle_of_its_body_does_no_harm(server, caplog):
    with connect(server) as connection:
        connection.sendall(head(length=1000) + b'{"text":')
        wait_until(lambda: any(one.scope for one in connections(server)), "the arrival of the head")
    wait_until(lambda: server.metric("http_responses_total[499]") >= 1, "the note")
    assert "failed" not in caplog.text
    assert httpx.post(f"{server.url}/generate", json={"text": "say:a"}).json()["text"] == "a"


def test_a_reader_that_takes_nothing_holds_up_nobody(server):
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", server.port))
        lazy.sendall(message(text=["abc"] * 4, stream=True, return_logprob=True, sampling_params=LONG))
        wait_until(lambda: server.stats.num_running, "the start")
        for _ in range(5):
            assert httpx.post(f"{server.url}/generate", json={"text": "say:abc"}).json()["text"] == "abc"
        assert server.stats.num_running == 4
    check_idle(server)


def test_a_reader_that_stalls_too_long_is_taken_for_gone(monkeypatch):
    monkeypatch.setattr("tureen.http.connection.WRITE_TIMEOUT_S", 0.3)
    with LiveServer() as server, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", server.port))
        params = {"max_new_tokens": 1900, "n": 16}
        lazy.sendall(message(text="abc", stream=True, return_logprob=True, top_logprobs_num=20, sampling_params=params))
        wait_until(lambda: server.stats.total_output_tokens, "the start")
        check_idle(server)
        wait_until(lambda: server.metric("num_aborted_requests_total") > 0, "it is counted")


ERRORS = (
    (message(text=""), 400),
    (head(length=3) + b"{{{", 400),
    (message("/nope", text="a"), 404),
    (message("/generate/", text="x" * 100_000), 307),
    (head(method="DELETE"), 405),
    (head(length=2).replace(b"application/json", b"text/plain") + b"{}", 415),
)


def test_a_connection_can_be_used_on_after_an_error_also_by_a_pipelining_client(server):
    for bad, status in ERRORS:
        is_used_on(server, bad, status)


def is_used_on(server, bad, status):
    good = message(text="say:good")
    with connect(server) as connection:
        connection.sendall(bad)
        ((first, _, _),) = read_responses(connection, 1)
        connection.sendall(good)
        ((second, _, body),) = read_responses(connection, 1)
        assert (first, second, json.loads(body)["text"]) == (status, 200, "good"), bad[:100]
    with connect(server) as connection:
        connection.sendall(bad + good + bad + good)
        responses = read_responses(connection, 4)
        assert [response[0] for response in responses] == [status, 200, status, 200], bad[:100]
        assert json.loads(responses[3][2])["text"] == "good"


def test_after_a_body_that_was_not_read_the_connection_is_closed():
    with LiveServer(max_body_bytes=2000) as server:
        for request in (
            head(length=10**9) + b"x" * 5000,
            head().replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"fa0\r\n" + b"x" * 4000 + b"\r\n",
        ):
            with connect(server) as connection:
                connection.sendall(request)
                ((status, headers, _),) = read_responses(connection, 1)
                assert (status, headers["connection"]) == (413, "close")
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(100) == b""
        assert httpx.post(f"{server.url}/generate", json={"text": "say:a"}).status_code == 200


NONSENSE = (
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET / HTTP/9.9\r\n\r\n",
    b"nonsense\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
)


def test_bytes_that_are_no_proper_request_get_400(server):
    wrong = []
    for nonsense in NONSENSE:
        with connect(server) as connection:
            connection.sendall(nonsense)
            ((status, headers, body),) = read_responses(connection, 1)
            told = status, headers["content-type"], json.loads(body)["error"]["type"]
        wrong += [(nonsense, told)] * (told != (400, "application/json", "invalid_request_error"))
    assert wrong == []
    assert httpx.get(f"{server.url}/health").status_code == 200


LARGE_HEADS = {
    "many headers": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    "endless header": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * 2_000_000,
    "endless path": b"GET /" + b"x" * 2_000_000,
    "long path": b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
}


def test_a_head_over_the_limit_is_refused_without_waiting_for_its_end(server):
    for name, head_bytes in LARGE_HEADS.items():
        with connect(server) as connection:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(head_bytes)
            with contextlib.suppress(ConnectionResetError):  # what it sent after our answer may reset the connection
                ((status, _, body),) = read_responses(connection, 1)
                assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large"), name
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b"", name
    assert httpx.get(f"{server.url}/health").status_code == 200
    a_head_of_many_small_pieces_just_under_the_limit_is_taken(server)


def a_head_of_many_small_pieces_just_under_the_limit_is_taken(server):
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        for _ in range(60):
            connection.sendall(b"X: " + b"y" * 1000 + b"\r\n")
        connection.sendall(b"\r\n")
        assert read_responses(connection, 1)[0][0] == 200


def test_a_head_or_body_that_stalls_is_closed_and_running_answers_are_not(monkeypatch):
    with LiveServer(slow=True) as server, contextlib.ExitStack() as stack:
        pipelined = stack.enter_context(connect(server))
        pipelined.sendall(message(text="abc", sampling_params={"max_new_tokens": 60}))
        wait_until(lambda: server.stats.total_output_tokens, "the start")  # its head has arrived in time
        monkeypatch.setattr("tureen.http.connection.HEAD_TIMEOUT_S", 0.2)
        monkeypatch.setattr("tureen.http.middleware.BODY_GRACE_S", 0.2)
        pipelined.sendall(b"POST /gen")
        for sent in (b"", b"POST /gen", head(length=100) + b'{"text":'):
            stalled = stack.enter_context(connect(server))
            stalled.sendall(sent)
            ((status, headers, body),) = read_responses(stalled, 1)
            assert (status, headers["connection"]) == (408, "close")
            assert json.loads(body)["error"]["code"] == "request_timeout"
            with contextlib.suppress(ConnectionResetError):  # what was sent after the answer
                assert stalled.recv(100) == b""
        ((status, _, body),) = read_responses(pipelined, 1)
        assert (status, json.loads(body)["meta_info"]["completion_tokens"]) == (200, 60)


def test_many_idle_connections_keep_nobody_out(server, monkeypatch):
    monkeypatch.setattr("tureen.http.connection.HEAD_TIMEOUT_S", PATIENCE_S)
    with contextlib.ExitStack() as stack:
        for index in range(200):
            idle = stack.enter_context(connect(server))
            idle.sendall(b"POST /generate HT" if index % 2 else b"")
        assert httpx.post(f"{server.url}/generate", json={"text": "say:a"}).json()["text"] == "a"
        assert len(connections(server)) >= 200


PATHS = ("//generate", "/generate/", "/%67enerate", "/v1/../generate", "http://[::1]:1/generate")
TWO_KEYS = b"GET /model_info HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: x\r\nAuthorization: Bearer k3y\r\n\r\n"


def test_no_path_and_no_repeated_header_gets_around_the_key_over_a_socket():
    content = b'{"text":"say:a"}'
    requests = {path: (head(path, len(content)) + content, 401) for path in PATHS} | {"two keys": (TWO_KEYS, 400)}
    told = {}
    with LiveServer(api_key="k3y") as server:
        for name, (request, _) in requests.items():
            with connect(server) as connection:
                connection.sendall(request)
                told[name] = read_responses(connection, 1)[0][0]
    assert told == {name: status for name, (_, status) in requests.items()}


def test_while_it_drains_the_server_refuses_what_comes_and_finishes_what_runs():
    with LiveServer(slow=True) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 1500}}
        whole = pool.submit(httpx.post, f"{server.url}/generate", json=body)
        streamed = pool.submit(httpx.post, f"{server.url}/generate", json=body | {"stream": True})
        wait_until(lambda: server.stats.num_running == 2, "the start")
        server.terminate()
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503, "the drain")
        refused = httpx.post(f"{server.url}/generate", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        server.hurry()
        assert whole.result().json()["meta_info"]["completion_tokens"] == 1500
        assert parse_events(streamed.result().text)[-1]["meta_info"]["completion_tokens"] == 1500
        server.wait_ended()


def test_what_does_not_end_in_time_is_told_so():
    with LiveServer(slow=True, drain_timeout_s=0.2) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        body = {"text": "abc", "sampling_params": LONG}
        whole = pool.submit(httpx.post, f"{server.url}/generate", json=body)
        streamed = pool.submit(httpx.post, f"{server.url}/generate", json=body | {"stream": True})
        wait_until(lambda: server.stats.num_running == 2, "the start")
        server.terminate()
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "draining")
        events = parse_events(streamed.result().text)
        assert events[-1]["error"]["code"] == "draining"
        assert events[0]["text"]
        server.wait_ended()


def test_an_idle_server_and_a_second_signal_end_without_waiting():
    with LiveServer(slow=True) as server, connect(server) as connection:
        connection.sendall(message(text="abc", stream=True, sampling_params=LONG))
        wait_until(lambda: server.stats.num_running == 1, "the start")
        server.terminate()
        wait_until(lambda: server.app.state.server.lifecycle.is_draining, "the drain")
        server.terminate()
        server.wait_ended()
        assert server.stats.total_output_tokens < LONG["max_new_tokens"]
    with LiveServer(drain_timeout_s=3600) as server:
        httpx.post(f"{server.url}/generate", json={"text": "say:a"})
        server.terminate()
        server.wait_ended()
