"""Streams of a server with several fronts, each followed on a connection of its own."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable

import httpx
from followers import MAX_ATTEMPTS, PATIENCE_S, wait_until
from server_process import ServerProcess

GONE = -1
"""The status of a stream that broke off."""

NUM_STREAMS = 8


class Stream:
    """A stream that is followed in a thread, on a connection of its own."""

    def __init__(self, client: Callable[[], httpx.Client], body: dict) -> None:
        self.begun = threading.Event()
        self.ids: list[int] = []
        self.finish: dict | None = None
        self.status = 0
        self._client = client
        self._event_id = self._name = ""
        self._thread = threading.Thread(target=self._run, args=(body | {"stream": True},), daemon=True)
        self._thread.start()

    def join(self) -> Stream:
        self._thread.join(PATIENCE_S)
        return self

    def resume(self) -> Stream:
        with self._client() as http:
            headers = {"last-event-id": self._event_id}
            with http.stream("GET", f"/generate/{self._name}/events", headers=headers) as response:
                self._read(response)
        return self

    def _run(self, body: dict) -> None:
        try:
            with self._client() as http, http.stream("POST", "/generate", json=body) as response:
                self._name = response.headers["x-request-id"]
                self._read(response)
        except httpx.RemoteProtocolError:
            self.status = GONE
        finally:
            self.begun.set()

    def _read(self, response: httpx.Response) -> None:
        self.status = response.status_code
        for line in response.iter_lines():
            if line.startswith("id: "):
                self._event_id = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                self.ids, self.finish = event["output_ids"], event["meta_info"]["finish_reason"]
                self.begun.set()


def status(server: ServerProcess) -> dict:
    return httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()


def begin(server: ServerProcess, body: dict) -> list[Stream]:
    """Streams of a server with replicas, eight at least, of which each front and each engine has some."""
    begun: list[Stream] = []

    def are_spread() -> bool:
        now = status(server)
        everywhere = [*now["fronts"], *now["models"][0]["replicas"]]
        return len(begun) >= NUM_STREAMS and all(each["num_running"] for each in everywhere)

    while not are_spread():
        begun += [Stream(lambda: httpx.Client(base_url=server.url, timeout=PATIENCE_S), body) for _ in range(4)]
        for stream in begun:
            assert stream.begun.wait(PATIENCE_S)
    return begun


def kill_front(server: ServerProcess, body: dict, expected: list[int]) -> None:
    """Kills a front under streams: those that it had break off, all others bring what is expected, and it is replaced.
    Where its own had all ended before it was killed, it is done again."""

    def is_replaced(pid: int) -> bool:
        front = status(server)["fronts"][1]
        return front["up"] and front["pid"] != pid

    for _ in range(MAX_ATTEMPTS):
        streams = begin(server, body)
        victim = status(server)["fronts"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        lost = [stream for stream in streams if stream.join().status == GONE]
        assert len(lost) <= victim["num_running"]  # some may have ended
        assert all(stream.ids == expected for stream in streams if stream not in lost)
        wait_until(lambda pid=victim["pid"]: is_replaced(pid), "it is replaced")
        if lost:
            return
    raise AssertionError(f"no stream ran when the front was killed, {MAX_ATTEMPTS} times")
