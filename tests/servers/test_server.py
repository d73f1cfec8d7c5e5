"""The real server with the real model, over HTTP."""

from __future__ import annotations

import contextlib
import json
import signal
import socket

import httpx
from recorded_texts import CAPITAL, RECORDED
from server_process import ServerProcess, metric
from timeouts import PATIENCE_S, wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 16}


def generate(server: ServerProcess, **body) -> dict:
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_model_answers_a_question_again_from_the_cache(server):
    the_model_answers_a_question_and_says_why_it_stopped(server)
    a_repeated_prompt_comes_from_the_cache_and_changes_nothing(server)
    a_client_that_leaves_frees_its_place(server)


def the_model_answers_a_question_and_says_why_it_stopped(server):
    text, num_tokens = RECORDED[CAPITAL]
    answer = generate(server, text=CAPITAL, sampling_params={"temperature": 0, "max_new_tokens": 32})
    assert answer["text"] == text.removesuffix("<|im_end|>")
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == num_tokens
    assert answer["output_ids"][-1] == 2


def a_repeated_prompt_comes_from_the_cache_and_changes_nothing(server):
    prompt = "In the year 1492 a sailor from Genoa left the harbour with three ships. " * 8
    first = generate(server, text=prompt, sampling_params=GREEDY)
    second = generate(server, text=prompt, sampling_params=GREEDY)
    salted = generate(server, text=prompt, sampling_params=GREEDY, cache_salt="mine")
    assert first["output_ids"] == second["output_ids"] == salted["output_ids"]
    assert second["meta_info"]["cached_tokens"] > 100
    assert salted["meta_info"]["cached_tokens"] == 0


def a_client_that_leaves_frees_its_place(server):
    for streamed in (True, False):
        leave_while_it_runs(server, streamed)


def leave_while_it_runs(server: ServerProcess, streamed: bool) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "text": "Count:",
            "stream": streamed,
            "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
        }
    ).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    wait_until(lambda: metric(server.url, "sglang:num_running_reqs") == 0, "nothing of other tests runs")
    before = metric(server.url, "sglang:num_aborted_requests_total")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: metric(server.url, "sglang:num_running_reqs") == 1, "the request runs")
    wait_until(lambda: metric(server.url, "sglang:num_running_reqs") == 0, "the request is aborted")
    wait_until(lambda: metric(server.url, "sglang:num_aborted_requests_total") == before + 1, "it is counted")


NUM_TOKENS = (60, 600, 6000)
"""Of a request during which a server is told to end. Where it was told too late a longer one is tried."""


def test_an_engine_in_a_process_gives_the_same_tokens_and_a_terminated_server_finishes_what_runs(server):
    asked = {"text": "Once upon a time", "sampling_params": {"sampling_seed": 3, "max_new_tokens": 16}}
    expected = generate(server, **asked)["output_ids"]
    for num_tokens in NUM_TOKENS:
        with ServerProcess("--engine", "process", "--drain-timeout-s", str(PATIENCE_S)) as ending:
            assert generate(ending.wait_ready(), **asked)["output_ids"] == expected
            refused, answer = refused_by_a_server_that_ends(ending, num_tokens)
            assert answer["meta_info"]["completion_tokens"] == num_tokens
            assert ending.stop() == 0
        if refused is not None:
            break
    assert refused is not None, "told too late each time"
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1


def refused_by_a_server_that_ends(server: ServerProcess, num_tokens: int) -> tuple[httpx.Response | None, dict]:
    """Has a server end during a request of so many tokens. Returns what another request is answered then, None where
    the server was gone, and the last event of the first."""
    body = {"text": "Count:", "stream": True, "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True}}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=PATIENCE_S) as response:
        data = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        events = [next(data)]
        server.process.send_signal(signal.SIGTERM)
        refused = None
        with contextlib.suppress(httpx.TransportError):
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503, "the drain begins")
            refused = httpx.post(f"{server.url}/generate", json={"text": "a"})
        events += data
    assert events[-1] == "[DONE]"
    return refused, json.loads(events[-2])
