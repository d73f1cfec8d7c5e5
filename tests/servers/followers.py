"""Clients of a real server whose engine is disturbed: each follows one stream, and says what came of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from server_process import ServerProcess, command_line, metric
from timeouts import PATIENCE_S, wait_until

BEGUN_EVENTS = 5
MAX_ATTEMPTS = 20
REPLACED, RESUMED = "sglang:engine_replacements_total", "sglang:num_resumed_requests_total"
TEXT = "Once upon a time there was a small town by the sea. "


def streams(num_tokens: int) -> dict[str, dict]:
    """Bodies of streams of about so many tokens, which an adapter `late` must be loaded for."""
    long = {"max_new_tokens": num_tokens, "ignore_eos": True}
    count = num_tokens * 2 // 5
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}}
    schema = json.dumps(numbers | {"minItems": count, "maxItems": count})
    seeded = {"temperature": 0.8, "top_p": 0.95, "sampling_seed": 7}
    penalties = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    greedy = {"text": TEXT, "sampling_params": long | {"temperature": 0}}
    return {
        "greedy": greedy,
        "warm": {"text": TEXT, "sampling_params": long | seeded},
        "samples": {"text": TEXT, "sampling_params": long | {"temperature": 0.8, "sampling_seed": 30, "n": 2}},
        "grammar": {
            "text": f"{count} numbers, as JSON: ",
            "sampling_params": {"max_new_tokens": 3 * num_tokens, "sampling_seed": 2, "json_schema": schema},
        },
        "penalties": {"text": TEXT, "sampling_params": long | {"sampling_seed": 5} | penalties},
        "scores": greedy | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
        "adapter": greedy | {"lora_path": "late"},
    }


class Follower:
    """One stream. `begun` is set once it has brought some events, or has ended: a server that is held up may tell all
    of it at once. One that `leaves` closes its connection after some events, and comes back for the rest when it
    `may_return`."""

    def __init__(self, server: ServerProcess, body: dict, *, leaves: bool = False) -> None:
        self.begun = threading.Event()
        self.may_return = threading.Event()
        self.last: dict[int, dict] = {}
        self._url = f"{server.url}/generate"
        self._body = body | {"stream": True}
        self._leaves = leaves
        self.has_ended = False
        self._num_events = 0  # each has a number, the one after the one before it
        self._last_id = ""

    def run(self) -> list[tuple]:
        """What came of each output. Every event must go on where the one before it ended."""
        try:
            return self._run()
        finally:
            self.has_ended = True
            self.begun.set()

    def _run(self) -> list[tuple]:
        with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as response:
            name = response.headers["x-request-id"]
            has_left = self._read(response, self._leaves)
        if has_left:
            assert self.may_return.wait(PATIENCE_S)
            headers = {"Last-Event-ID": self._last_id}
            with httpx.stream("GET", f"{self._url}/{name}/events", headers=headers, timeout=PATIENCE_S) as response:
                self._read(response)
        return [self._content(self.last[index]) for index in sorted(self.last)]

    def _read(self, response: httpx.Response, leaves: bool = False) -> bool:
        """Reads to the end. Returns whether it left before."""
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("id: "):
                assert line.endswith(f"-{self._num_events}")
                self._last_id = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                self._take(json.loads(line.removeprefix("data: ")))
                self._num_events += 1
                if self._num_events == BEGUN_EVENTS:
                    self.begun.set()
                    if leaves:
                        return True
        return False

    def _take(self, event: dict) -> None:
        assert "error" not in event, event
        before = self.last.get(event.get("index", 0))
        if before is not None:
            assert event["text"].startswith(before["text"])
            assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert event["meta_info"]["completion_tokens"] >= before["meta_info"]["completion_tokens"]
        self.last[event.get("index", 0)] = event

    @staticmethod
    def _content(event: dict) -> tuple:
        told = ("finish_reason", "completion_tokens", "prompt_tokens", "output_token_logprobs", "input_token_logprobs")
        return event["text"], event["output_ids"], [event["meta_info"].get(name) for name in told]


def follow_all(
    server: ServerProcess,
    streams: dict[str, dict],
    disturb: Callable[[], None] | None = None,
    leaving: tuple[str, ...] = (),
) -> dict[str, list[tuple]]:
    """All streams at once, and what is done when each has begun and none has ended: where one has ended before another
    has begun (a new engine compiles its grammar first), nothing is done and all are asked for again. The `leaving`
    come back after it."""
    for _ in range(MAX_ATTEMPTS):
        followers = {name: Follower(server, body, leaves=name in leaving) for name, body in streams.items()}
        with ThreadPoolExecutor(len(followers)) as pool:
            running = {name: pool.submit(one.run) for name, one in followers.items()}
            is_disturbed = disturb is not None and _all_run(followers)
            if is_disturbed:
                disturb()
            for one in followers.values():
                one.may_return.set()
            contents = {name: one.result(PATIENCE_S) for name, one in running.items()}
        if disturb is None or is_disturbed:
            return contents
    raise AssertionError(f"one stream had ended before the last had begun, {MAX_ATTEMPTS} times")


def _all_run(followers: dict[str, Follower]) -> bool:
    """Whether none has ended when each has begun."""
    for name, one in followers.items():
        assert one.begun.wait(PATIENCE_S), name
    return not any(one.has_ended for one in followers.values())


def follow_through_death(follow: Callable[[], Any], server: ServerProcess, num_resumed: int) -> Any:
    """What `follow`, which kills an engine once, brings when it has killed it while so many requests ran in it, as the
    server counts them. Its clients may hear late that they have ended: where it was too late, it is done again."""
    for _ in range(MAX_ATTEMPTS):
        num_replaced, num_before = metric(server.url, REPLACED), metric(server.url, RESUMED)
        contents = follow()
        wait_until(lambda before=num_replaced: metric(server.url, REPLACED) > before, "the engine is replaced")
        assert metric(server.url, REPLACED) == num_replaced + 1
        if metric(server.url, RESUMED) >= num_before + num_resumed:
            return contents
    raise AssertionError(f"fewer than {num_resumed} requests ran when the engine was killed, {MAX_ATTEMPTS} times")


def engine(server: ServerProcess) -> int:
    (pid,) = engines(server)
    return pid


def engines(server: ServerProcess) -> list[int]:
    return [pid for pid in server.children() if "tureen.serving.child" in command_line(pid)]


def states(server: ServerProcess) -> list[str]:
    """Those of the engines of all replicas."""
    (model,) = httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["models"]
    return [replica["engine"] for replica in model["replicas"]]


def health(server: ServerProcess) -> tuple[int, str]:
    response = httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
    return response.status_code, "" if response.status_code == 200 else response.json()["error"]["code"]


def wait_well(server: ServerProcess) -> None:
    wait_until(lambda: health(server)[0] == 200, "the engine is well")
