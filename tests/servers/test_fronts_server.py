"""The real server with three fronts on one port: clients need not know which one they have reached, or that it dies.

test_replicas_server.py kills an engine of two fronts; tests/serving/test_front_clients.py has fronts with one engine.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from followers import MAX_ATTEMPTS, PATIENCE_S, TEXT, wait_until
from front_streams import GONE, Stream
from server_process import ServerProcess, command_line, metric

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
NUM_FRONTS = 3
NUM_TOKENS = 60
MANY = 8
"""Connections enough that not all of them reach the same front: the kernel spreads them."""
SHORT = {"text": TEXT, "sampling_params": {"max_new_tokens": 6, "temperature": 0.8, "sampling_seed": 3}}
LONG = {"text": TEXT, "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0.8, "ignore_eos": True}}
MOST = 2
KEYS = {"alice": "alices-key", "bob": "bobs-key"}


@pytest.fixture(scope="module")
def server(default_model_source, tmp_path_factory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("fronts")
    keys = folder / "keys"
    keys.write_text(f"alice {KEYS['alice']}\nbob {KEYS['bob']} max_requests={MOST}\n")
    keys.chmod(0o600)
    settings = ["--api-key-file", str(keys), "--admin-api-key", "boss", "--responses-store", str(folder / "kept")]
    patient = "--drain-timeout-s", str(PATIENCE_S), "--freeze-grace-s", str(PATIENCE_S)
    with ServerProcess("--api-workers", str(NUM_FRONTS), *patient, *settings) as running:
        yield running.wait_ready()


def call(server: ServerProcess, path: str, body: dict | None = None, *, key: str = "alices-key", **headers: str):
    """Each call has a connection of its own."""
    method = "GET" if body is None else "POST"
    headers = {"authorization": f"Bearer {key}", **headers}
    return httpx.request(method, f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE_S)


def fronts(server: ServerProcess) -> list[dict]:
    answer = call(server, "/status")
    assert answer.status_code == 200, server.output
    return answer.json()["fronts"]


def is_replaced(server: ServerProcess, pid: int) -> bool:
    """Whether another process than this one is the front after the first."""
    front = fronts(server)[1]
    return front["up"] and front["pid"] != pid


def caller(server: ServerProcess, key: str = "alices-key") -> Callable[[], httpx.Client]:
    headers = {"authorization": f"Bearer {key}"}
    return lambda: httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S)


def begin_on_all(server: ServerProcess, body: dict) -> list[Stream]:
    """Streams of which each front has some."""
    begun: list[Stream] = []
    while not begun or not all(front["num_running"] for front in fronts(server)):
        begun += [Stream(caller(server), body) for _ in range(4)]
        for stream in begun:
            assert stream.begun.wait(PATIENCE_S)
    return begun


@pytest.fixture(scope="module")
def alone(server) -> dict:
    """What one front answers: a client that stays on its connection has one."""
    with httpx.Client(headers={"authorization": "Bearer alices-key"}, timeout=PATIENCE_S) as client:
        return client.post(f"{server.url}/generate", json=LONG | seeded(5)).json()


def seeded(seed: int) -> dict:
    return {"sampling_params": LONG["sampling_params"] | {"sampling_seed": seed}}


def metrics_are_the_sums_of_all_fronts_whichever_answers(server):
    name, latencies = "sglang:num_requests_total", "sglang:e2e_request_latency_seconds_count"
    before, measured = metric(server.url, name), metric(server.url, latencies)
    with ThreadPoolExecutor(MANY) as pool:
        answers = list(pool.map(lambda _: call(server, "/generate", SHORT), range(MANY)))
    assert [answer.status_code for answer in answers] == [200] * MANY
    assert [metric(server.url, name) for _ in range(MANY)] == [before + MANY] * MANY
    assert metric(server.url, latencies) == measured + MANY


def a_session_is_known_to_all_fronts(server):
    opened = call(server, "/open_session", {"capacity_of_str_len": 100_000}).json()
    rid = None
    num_prompt = 0
    for _ in range(MANY):
        params = {"id": opened, "rid": rid}
        answer = call(server, "/generate", SHORT | {"session_params": params})
        assert answer.status_code == 200, answer.text
        info = answer.json()["meta_info"]
        assert info["prompt_tokens"] > num_prompt  # it has all before
        rid, num_prompt = info["id"], info["prompt_tokens"]
    escaped = json.dumps(SHORT | {"session_params": {"id": opened, "rid": rid}}).replace("session_p", "\\u0073ession_p")
    for _ in range(MANY):
        headers = {"authorization": "Bearer alices-key", "content-type": "application/json"}
        answer = httpx.post(f"{server.url}/generate", content=escaped, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
    closed = [call(server, "/close_session", {"session_id": opened}).status_code for _ in range(2)]
    assert closed == [200, 404]


def a_kept_response_is_continued_on_any_front(server):
    before = None
    for turn in range(MANY):
        body = {"model": "m", "input": f"turn {turn}", "max_output_tokens": 4, "store": True}
        answer = call(server, "/v1/responses", body | ({} if before is None else {"previous_response_id": before}))
        assert answer.status_code == 200, answer.text
        before = answer.json()["id"]
        assert call(server, f"/v1/responses/{before}").json()["id"] == before


def an_idempotency_key_is_known_to_all_fronts(server):
    headers = {"idempotency-key": uuid.uuid4().hex}
    with ThreadPoolExecutor(MANY) as pool:
        answers = list(pool.map(lambda _: call(server, "/generate", SHORT, **headers), range(MANY)))
    assert len({answer.content for answer in answers}) == 1
    assert sorted(answer.headers.get("idempotent-replayed", "") for answer in answers) == [""] + ["true"] * (MANY - 1)


def an_abort_reaches_the_requests_of_all_fronts(server):
    streams = begin_on_all(server, {"text": TEXT, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}})
    answer = call(server, "/abort_request", {"abort_all": True}, key="boss")
    assert answer.json() == {"aborted": len(streams)}
    assert {stream.join().finish["type"] for stream in streams} == {"abort"}


def a_client_has_no_more_requests_than_it_may_over_all_fronts(server):
    endless = {"text": TEXT, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    streams = [Stream(caller(server, KEYS["bob"]), endless) for _ in range(MANY)]
    for stream in streams:
        assert stream.begun.wait(PATIENCE_S)
    assert sorted(stream.status for stream in streams) == [200] * MOST + [429] * (MANY - MOST)
    assert call(server, "/abort_request", {"abort_all": True}, key="boss").json() == {"aborted": MOST}


def an_adapter_that_is_loaded_is_there_for_all_fronts(server):
    call(server, "/unload_lora_adapter", {"lora_name": "late"}, key="boss")  # of a run before
    loading = {"lora_name": "late", "lora_path": str(ADAPTERS / "whisper")}
    assert call(server, "/load_lora_adapter", loading, key="boss").status_code == 200
    answers = [call(server, "/generate", SHORT | {"lora_path": "late"}) for _ in range(MANY)]
    assert len({tuple(answer.json()["output_ids"]) for answer in answers}) == 1
    assert call(server, "/unload_lora_adapter", {"lora_name": "late"}, key="boss").status_code == 200
    gone = {call(server, "/generate", SHORT | {"lora_path": "late"}).status_code for _ in range(MANY)}
    assert gone == {404}


def admin_routes_and_wrong_keys_are_refused_on_all_fronts(server):
    assert {call(server, "/flush_cache", {}).status_code for _ in range(MANY)} == {403}
    assert {call(server, "/generate", SHORT, key="nobodys").status_code for _ in range(MANY)} == {401}


def a_large_body_is_refused_by_all_fronts(server):
    large = {"text": "x" * (33 << 20)}
    for path in ("/generate", "/open_session"):
        assert {call(server, path, large).status_code for _ in range(4)} == {413}


ON_ALL = (
    metrics_are_the_sums_of_all_fronts_whichever_answers,
    a_session_is_known_to_all_fronts,
    a_kept_response_is_continued_on_any_front,
    an_idempotency_key_is_known_to_all_fronts,
    an_abort_reaches_the_requests_of_all_fronts,
    a_client_has_no_more_requests_than_it_may_over_all_fronts,
    an_adapter_that_is_loaded_is_there_for_all_fronts,
    admin_routes_and_wrong_keys_are_refused_on_all_fronts,
    a_large_body_is_refused_by_all_fronts,
)


def test_each_front_knows_what_was_done_at_the_others(server):
    for check in ON_ALL:
        check(server)


def test_a_killed_front_loses_no_request_but_its_own_and_its_successor_knows_what_operators_changed(server, alone):
    call(server, "/unload_lora_adapter", {"lora_name": "late"}, key="boss")  # of a run before
    loading = {"lora_name": "late", "lora_path": str(ADAPTERS / "whisper")}
    assert call(server, "/load_lora_adapter", loading, key="boss").status_code == 200
    assert call(server, "/update_weight_version", {"new_version": "step-2"}, key="boss").status_code == 200
    name = "sglang:num_requests_total"
    for _ in range(MAX_ATTEMPTS):
        streams = begin_on_all(server, LONG | seeded(5))
        victim = fronts(server)[1]
        counted = metric(server.url, name)
        os.kill(victim["pid"], signal.SIGKILL)
        lost = [stream for stream in streams if stream.join().status == GONE]
        assert len(lost) <= victim["num_running"]  # some may have ended
        assert all(stream.ids == alone["output_ids"] for stream in streams if stream not in lost)
        wait_until(lambda pid=victim["pid"]: is_replaced(server, pid), "it is replaced")
        assert fronts(server)[1]["num_replacements"] == victim["num_replacements"] + 1
        wait_until(lambda: call(server, "/status").json()["models"][0]["num_running"] == 0, "nothing runs")
        assert metric(server.url, name) >= counted  # what it had counted is not lost
        if lost:  # all may have ended before it was killed
            break
    assert lost
    streams = begin_on_all(server, SHORT | {"lora_path": "late"} | {"sampling_params": LONG["sampling_params"]})
    assert {stream.join().status for stream in streams} == {200}
    answers = [call(server, "/generate", SHORT).json() for _ in range(MANY)]
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {"step-2"}
    assert call(server, "/unload_lora_adapter", {"lora_name": "late"}, key="boss").status_code == 200


def test_a_front_that_is_stopped_keeps_nobody_who_comes_and_goes_on_when_it_thaws(server, alone):
    victim, expected = fronts(server)[1], call(server, "/generate", SHORT).json()["output_ids"]
    streams = begin_on_all(server, LONG | seeded(5))
    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        answers = [call(server, "/generate", SHORT).json()["output_ids"] for _ in range(MANY)]
    finally:
        os.kill(victim["pid"], signal.SIGCONT)
    assert answers == [expected] * MANY
    for stream in streams:
        assert stream.join().ids == alone["output_ids"]
    assert fronts(server)[1]["pid"] == victim["pid"]


def test_a_stream_whose_front_dies_is_resumed_at_another(default_model_source, tmp_path):
    path = tmp_path / "socket"

    def client() -> httpx.Client:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=PATIENCE_S
        )

    patient = "--resume-grace", str(PATIENCE_S), "--freeze-grace-s", str(PATIENCE_S)
    with ServerProcess("--api-workers", "2", "--uds", str(path), *patient) as running, client() as http:
        running.wait_started()
        expected = http.post("/generate", json=LONG | seeded(5)).json()["output_ids"]

        def other() -> dict:
            return http.get("/status").json()["fronts"][1]

        for _ in range(MAX_ATTEMPTS):
            streams = [Stream(client, LONG | seeded(5)) for _ in range(MANY)]
            for stream in streams:
                assert stream.begun.wait(PATIENCE_S)
            victim = other()["pid"]
            os.kill(victim, signal.SIGKILL)
            broken = [stream for stream in streams if stream.join().status == GONE]
            for stream in broken:
                assert stream.resume().status == 200
            assert [stream.ids for stream in streams] == [expected] * MANY
            if broken:  # all may have ended before it was killed
                break
            wait_until(lambda pid=victim: other()["up"] and other()["pid"] != pid, "it is replaced")
        assert broken
        assert running.stop() == 0
    assert not path.exists()


def test_a_server_that_is_told_to_end_lets_the_streams_of_all_fronts_end(server, alone):
    streams = begin_on_all(server, LONG | seeded(5))
    pids = [front["pid"] for front in fronts(server)]
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        assert stream.join().ids == alone["output_ids"]
    assert server.stop() == 0
    assert not any(command_line(pid) for pid in pids)
    assert "Traceback" not in server.output
