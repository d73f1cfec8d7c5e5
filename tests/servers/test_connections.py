"""Over real sockets: documented clients, clients that leave or read slowly, the server that drains.

tests/api/test_http_*.py send the server's protocol everything else, in memory.
"""

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
from timeouts import PATIENCE_S, wait_until

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


def test_a_client_that_leaves_takes_along_its_request_and_nothing_else(server, caplog):
    for stream, reset, text in itertools.product((True, False), (True, False), ("abc", ["abc", "abd"])):
        leave_while_it_runs(server, stream, reset, {"text": text})
    for stream in (True, False):
        leave_while_it_waits(server, stream)
    caplog.set_level("INFO", logger="tureen.http")
    for stream in (True, False):
        caplog.clear()
        leave_and_be_noted(server, caplog, stream)
    a_stream_that_was_read_to_its_end_is_no_client_that_left(server, caplog)
    leave_in_the_middle_of_a_body(server, caplog)


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


def leave_in_the_middle_of_a_body(server, caplog):
    gone = num_gone(server)
    with connect(server) as connection:
        connection.sendall(head(length=1000) + b'{"text":')
        wait_until(lambda: any(one.scope for one in connections(server)), "the arrival of the head")
    wait_until(lambda: num_gone(server) > gone, "the note")
    assert "failed" not in caplog.text
    assert httpx.post(f"{server.url}/generate", json={"text": "say:a"}).json()["text"] == "a"


def test_neither_a_reader_that_takes_nothing_nor_many_idle_connections_hold_up_others(server, monkeypatch):
    a_reader_takes_nothing(server)
    monkeypatch.setattr("tureen.http.connection.HEAD_TIMEOUT_S", PATIENCE_S)
    many_connections_are_idle(server)


def a_reader_takes_nothing(server):
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", server.port))
        lazy.sendall(message(text=["abc"] * 4, stream=True, return_logprob=True, sampling_params=LONG))
        wait_until(lambda: server.stats.num_running, "the start")
        for _ in range(5):
            assert httpx.post(f"{server.url}/generate", json={"text": "say:abc"}).json()["text"] == "abc"
        assert server.stats.num_running == 4
    check_idle(server)


def many_connections_are_idle(server):
    with contextlib.ExitStack() as stack:
        for index in range(200):
            idle = stack.enter_context(connect(server))
            idle.sendall(b"POST /generate HT" if index % 2 else b"")
        assert httpx.post(f"{server.url}/generate", json={"text": "say:a"}).json()["text"] == "a"
        assert len(connections(server)) >= 200


def test_a_drain_refuses_new_requests_and_ends_with_the_last_one_or_in_time_or_with_a_second_signal():
    while_it_drains_the_server_refuses_what_comes_and_finishes_what_runs()
    what_does_not_end_in_time_is_told_so()
    an_idle_server_and_a_second_signal_end_without_waiting()


def while_it_drains_the_server_refuses_what_comes_and_finishes_what_runs():
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


def what_does_not_end_in_time_is_told_so():
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


def an_idle_server_and_a_second_signal_end_without_waiting():
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
