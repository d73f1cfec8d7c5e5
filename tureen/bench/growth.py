"""Measures what more fronts and more replicas bring, over engines without a model that sleep as a GPU computes.

What a front computes for a token is its process's CPU time, which other work on the machine changes little. Clients run
in a process of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tureen.bench.http import Address, BenchError, ClientConnection
from tureen.bench.process import family, read_stat
from tureen.sandbox import child_process
from tureen.server import fastest_event_loop

FRONT_STEP_MS, REPLICA_STEP_MS = 5.0, 40.0
"""A step of the engine: short where fronts are to have much to do, long where engines are to be what is waited for."""

WAIT_S = 300.0
WORKER = b"tureen.api_workers.worker"


class StreamLoad(msgspec.Struct, frozen=True):
    """Streams that all begin at once."""

    num_streams: int = 64
    num_tokens: int = 200  # of each
    rounds: int = 2

    @property
    def num_all(self) -> int:
        """The tokens of all rounds."""
        return self.num_streams * self.num_tokens * self.rounds


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one server."""

    fronts: int
    replicas: int
    tokens_an_event: int
    tokens_per_s: float
    us_a_token: float  # CPU time of all fronts together
    busiest_us: float  # CPU time of the front that computed most, for each token of the server


def run_growth(load: StreamLoad = StreamLoad()) -> list[Growth]:  # noqa: B008 - it cannot be changed
    """Returns the figures of servers with one and two fronts, then with one and two replicas, which have twice the
    streams: more than one engine takes at once. Raises BenchError."""
    figures = []
    for fronts in (1, 2):
        with _server(fronts, 1, FRONT_STEP_MS) as server:
            figures += [_measured(server, fronts, 1, interval, load) for interval in (1, 4)]
    more = msgspec.structs.replace(load, num_streams=2 * load.num_streams, num_tokens=load.num_tokens // 2)
    for replicas in (1, 2):
        with _server(1, replicas, REPLICA_STEP_MS) as server:
            figures.append(_measured(server, 1, replicas, 1, more))
    return figures


def table(figures: Sequence[Growth]) -> str:
    """Returns the figures as text, each with its ratio to the first of its kind."""
    lines = [f"{'fronts':>6} {'replicas':>8} {'tok/event':>9} {'tok/s':>8} {'us/token':>8} {'growth':>7}"]
    by_front = {entry.tokens_an_event: entry for entry in reversed(figures[:4])}
    for place, entry in enumerate(figures):
        first = by_front[entry.tokens_an_event] if place < 4 else figures[4]
        growth = first.busiest_us / entry.busiest_us if place < 4 else entry.tokens_per_s / first.tokens_per_s
        lines.append(
            f"{entry.fronts:6} {entry.replicas:8} {entry.tokens_an_event:9} {entry.tokens_per_s:8.0f} "
            f"{entry.us_a_token:8.1f} {growth:7.2f}"
        )
    return "\n".join(
        [
            *lines,
            "growth of fronts: tokens for a CPU second of the busiest front; of replicas: tokens a second",
        ]
    )


class _Running(NamedTuple):
    pid: int
    port: int

    def front_seconds(self) -> dict[int, float]:
        """Returns the CPU time of each front so far, by process id."""
        pids = [self.pid, *(pid for pid in family(self.pid) if WORKER in Path(f"/proc/{pid}/cmdline").read_bytes())]
        return {pid: stat.cpu_s for pid in pids if (stat := read_stat(pid)) is not None}


@contextlib.contextmanager
def _server(fronts: int, replicas: int, step_ms: float) -> Iterator[_Running]:
    counts = str(fronts), str(replicas), str(step_ms)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with child_process.start("tureen.bench.growth_server", *counts, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise BenchError(f"growth_server {' '.join(counts)}: it did not start")
            yield _Running(process.pid, int(line))
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)
            process.kill()


def _measured(server: _Running, fronts: int, replicas: int, interval: int, load: StreamLoad) -> Growth:
    _drive(server.port, interval, load, rounds=1)
    before, began_s = server.front_seconds(), time.perf_counter()
    _drive(server.port, interval, load, rounds=load.rounds)
    passed_s, after = time.perf_counter() - began_s, server.front_seconds()
    seconds = [after[pid] - before[pid] for pid in before]
    return Growth(
        fronts=fronts,
        replicas=replicas,
        tokens_an_event=interval,
        tokens_per_s=round(load.num_all / passed_s, 1),
        us_a_token=round(1e6 * sum(seconds) / load.num_all, 2),
        busiest_us=round(1e6 * max(seconds) / load.num_all, 2),
    )


def _drive(port: int, interval: int, load: StreamLoad, *, rounds: int) -> None:
    """Runs the streams, in another process. Raises BenchError."""
    counts = map(str, (port, interval, load.num_streams, load.num_tokens, rounds))
    with child_process.start("tureen.bench.growth", *counts, stderr=subprocess.PIPE) as process:
        try:
            _, said = process.communicate(timeout=WAIT_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise BenchError(f"the streams failed: {said.decode(errors='replace')[-500:]}")


async def _read_streams(port: int, interval: int, num_streams: int, num_tokens: int, rounds: int) -> None:
    address = Address(f"http://127.0.0.1:{port}")

    async def read(number: int) -> None:
        params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream_interval": interval}
        prompt = [1000 + 16 * number + place for place in range(8)]
        body = msgspec.json.encode({"input_ids": prompt, "stream": True, "sampling_params": params})
        connection, last = ClientConnection(address), b""
        try:
            async for data in connection.events("/generate", body):
                last, before = data, last
        finally:
            connection.close()
        count = msgspec.json.decode(before)["meta_info"]["completion_tokens"] if last == b"[DONE]" else 0
        if count != num_tokens:
            raise BenchError(f"a stream of {num_tokens} tokens had {count}: {last[:300]!r}")

    for _ in range(rounds):
        await asyncio.gather(*(read(number) for number in range(num_streams)))


if __name__ == "__main__":
    os.nice(1)  # the server is measured, not what reads
    with asyncio.Runner(loop_factory=fastest_event_loop()) as _runner:
        _runner.run(_read_streams(*map(int, sys.argv[1:])))
