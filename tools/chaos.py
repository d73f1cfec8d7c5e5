"""Freeze and thaw, kill, starve each process of a server in the middle of eight streams, and compare the streams with
those of an undisturbed run. Prints survived / tried; the exit status is 1 where anything was not survived.

With `--replicas 2` in its arguments the server has two engines, and the next deed waits until both are well; with
`--api-workers 2` it has two fronts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tureen.logit_processor import CustomLogitProcessor

START_S, RECOVER_S, LIMIT_S = 180.0, 30.0, 240.0
NUM_STREAMS = 8
FROZEN_S, STARVED_TURN_S = 2.0, 0.1
ENGINE, PROCESSORS = "tureen.serving.child", "tureen.sampling.processor_worker"
WORKER = "tureen.api_workers.worker"
FIRST = "tureen.sandbox.child_main"
"""The module that runs first in every child; the next word names the program."""
PROCESSOR_FAILED = "error: custom_logit_processor_failed"
BROKEN_OFF = "the connection broke off"
READY = re.compile(rb"http://[0-9.]+:[0-9]+")


class NoDigits(CustomLogitProcessor):
    """Code of a client, for a process of its own."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
        logits[:, 16:26] = -float("inf")
        return logits


class Server:
    """A server of its own on a free port, with its engine in a process."""

    def __init__(self, args: list[str]) -> None:
        how = ["--port", "0", "--engine", "process", "--enable-custom-logit-processor", *args]
        command = [sys.executable, "-m", "tureen", "serve", *how]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.url = ""
        self._said: deque[str] = deque(maxlen=1000)  # lines of its log

    @property
    def pid(self) -> int:
        """The front's."""
        return self.process.pid

    def __enter__(self) -> Server:
        assert self.process.stdout is not None
        until_s, text = time.monotonic() + START_S, b""
        while not self.url:
            if not select.select([self.process.stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TimeoutError("the server did not start")
            piece = os.read(self.process.stdout.fileno(), 65536)
            text += piece
            match = READY.search(text)
            if match:
                self.url = match[0].decode()
            elif not piece:
                raise ChildProcessError(text.decode(errors="replace")[-2000:])
        threading.Thread(target=self._listen, daemon=True).start()  # who is not heard stops at a full pipe
        return self

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append(line.decode(errors="replace").rstrip())

    def take_complaints(self) -> list[str]:
        """Warnings and errors that it logged since the last call."""
        said = [self._said.popleft() for _ in range(len(self._said))]
        return [line for line in said if " WARNING " in line or " ERROR " in line]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGCONT, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def processes(self) -> list[tuple[str, int]]:
        """Names and ids of all processes below the front, by what they run."""
        processes, todo = [], [self.pid]
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError):
                below = [int(one) for task in os.listdir(f"/proc/{pid}/task")
                         for one in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]  # fmt: skip
                todo += below
                if pid != self.pid:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                    processes.append(
                        (next((one for one in words if one.startswith("tureen.") and one != FIRST), "helper"), pid)
                    )
        return sorted(processes)


async def metrics_of(http: httpx.AsyncClient) -> dict[str, float]:
    """Samples by their names, without labels; those that differ in labels only are added."""
    totals: dict[str, float] = {}
    for line in (await http.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.partition("{")[0].removeprefix("sglang:")
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


async def stream(http: httpx.AsyncClient, number: int) -> str:
    """One answer's text; a regular expression in every fourth, code in another, so that helpers are there too."""
    params: dict[str, Any] = {"max_new_tokens": 64, "sampling_seed": number, "temperature": 1.0, "ignore_eos": True}
    if number % 4 == 3:
        params |= {"regex": "[a-z ]{1,400}", "ignore_eos": False}
    text = ""
    body = {"text": f"Story number {number}:", "stream": True, "sampling_params": params}
    if number % 4 == 1:
        body["custom_logit_processor"] = NoDigits.to_str()
    headers = {"connection": "close"}  # the next one may reach another front
    async with http.stream("POST", "/generate", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            return f"{answer.status_code}: {(await answer.aread()).decode()}"
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"error: {event['error']['code']}"
                text = event["text"]
    return text


async def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(FROZEN_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def starve(pid: int) -> None:
    """A twentieth of its time. A priority would not do: who has given it away does not get it back, and children
    inherit it."""
    for _ in range(round(FROZEN_S / STARVED_TURN_S)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STARVED_TURN_S * 0.95)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(STARVED_TURN_S * 0.05)


DEEDS: dict[str, Callable[[int], Any]] = {"freeze": freeze, "kill": kill, "starve": starve}


async def disturb(server: Server, deed: str, name: str, rng: random.Random, expected: list[str]) -> str:
    """Do it once, under load. What was wrong; nothing = survived."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        streams = [asyncio.create_task(stream(http, number)) for number in range(NUM_STREAMS)]
        await asyncio.sleep(rng.random())
        victims = [pid for one, pid in server.processes() if one == name]
        if name == "front":
            victims = [server.pid]
        if not victims:
            await asyncio.gather(*streams, return_exceptions=True)
            return "there is no such process at this moment"
        with contextlib.suppress(ProcessLookupError):
            await DEEDS[deed](rng.choice(victims))
        texts = [
            BROKEN_OFF if isinstance(text, httpx.RemoteProtocolError | httpx.ReadError) else text
            for text in await asyncio.gather(*streams, return_exceptions=True)
        ]
        borne = PROCESSOR_FAILED if name == PROCESSORS else None  # what dies with its code
        if (deed, name) == ("kill", WORKER):
            borne = BROKEN_OFF  # and with its front
        wrong = [repr(text)[:160] for text, other in zip(texts, expected, strict=True) if text not in (other, borne)]
        if wrong:
            return f"{len(wrong)} of {NUM_STREAMS} streams differ: {wrong[0]}"
        until_s = time.monotonic() + RECOVER_S
        while not await is_well(http):
            if time.monotonic() > until_s:
                return "it does not recover"
            await asyncio.sleep(0.2)
    return ""


async def is_well(http: httpx.AsyncClient) -> bool:
    """Whether it takes requests, and all its engines and fronts are there."""
    if (await http.get("/health")).status_code != 200:
        return False
    status = (await http.get("/status")).json()
    replicas = status["models"][0].get("replicas", [])
    fronts = status.get("fronts", [])
    return all(each["engine"] == "healthy" for each in replicas) and all(each["up"] for each in fronts)


async def chaos(server: Server, seed: int) -> int:
    """Prints a line for each deed. Returns the exit status."""
    rng, until_s, tried, survived = random.Random(seed), time.monotonic() + LIMIT_S, 0, 0
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        expected = list(await asyncio.gather(*(stream(http, number) for number in range(NUM_STREAMS))))
    names = ["front", ENGINE]
    deeds = [(deed, name) for name in names for deed in DEEDS if (deed, name) != ("kill", "front")]
    for deed, name in deeds:
        for other in sorted({other for other, _ in server.processes()} - set(names)):  # some start late
            names.append(other)
            deeds += [(deed, other) for deed in DEEDS]
        if time.monotonic() > until_s:
            print(f"{'not tried':9} {deed:7} {name}: the time is up")
            continue
        wrong = await disturb(server, deed, name, rng, expected)
        tried += 1
        survived += not wrong
        print(f"{'survived' if not wrong else 'LOST':9} {deed:7} {name} {wrong}", flush=True)
        complaints = server.take_complaints()
        if wrong:
            print(*complaints, sep="\n", flush=True)
    print(f"{survived} / {tried} survived, seed {seed}")
    return int(survived < tried)


def main(args: list[str]) -> int:
    """`seed`, then more arguments of the server."""
    with Server(args[1:]) as server:
        return asyncio.run(chaos(server, int(args[0]) if args else 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
