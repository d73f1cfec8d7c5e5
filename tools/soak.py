"""Load on a server for so many seconds: memory, descriptors, threads and pages must be flat, counters must agree with
clients' answers. `make soak ARGS=300`."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from chaos import ENGINE, Server, metrics_of

ROUND_S = 5.0
GROWTH_MIB = 32
"""More than this between the first third and the end is a leak, not a cache that fills."""


class Figures(NamedTuple):
    """Sums over front and engine; helper processes come and go, and are counted."""

    mib: int  # that is their own and not in files
    descriptors: int
    threads: int
    helpers: int


def figures(server: Server) -> Figures:
    processes = server.processes()
    kib = descriptors = threads = 0
    for pid in (server.pid, *(pid for name, pid in processes if name == ENGINE)):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kib += sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap"))
        threads += int(status["Threads"])
        descriptors += len(os.listdir(f"/proc/{pid}/fd"))
    return Figures(kib >> 10, descriptors, threads, sum(name != ENGINE for name, _ in processes))


async def one_round(http: httpx.AsyncClient, rng: random.Random, tally: Counter[str]) -> None:
    """Requests of several kinds at once, until time is up."""
    until_s = asyncio.get_running_loop().time() + ROUND_S

    async def client() -> None:
        while asyncio.get_running_loop().time() < until_s:
            params: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 40)}
            if rng.random() < 0.2:  # a new one each time: what is compiled for it is kept within bounds
                params["regex"] = f"[a-z ]{{{rng.randrange(1, 40)},{rng.randrange(40, 400)}}}"
            body = {"text": f"{rng.random()} once upon a time", "sampling_params": params}
            answer = await http.post("/generate", json=body)
            tally[str(answer.status_code)] += 1
            if answer.status_code == 200:
                tally["tokens"] += answer.json()["meta_info"]["completion_tokens"]

    await asyncio.gather(*(client() for _ in range(4)))


async def soak(server: Server, seconds: float) -> int:
    """Prints a line a round. Returns the exit status."""
    rng, tally, seen = random.Random(1), Counter[str](), []
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        await one_round(http, rng, Counter())
        before = await metrics_of(http)
        for number in range(max(3, int(seconds / ROUND_S))):
            await one_round(http, rng, tally)
            (await http.post("/flush_cache")).raise_for_status()  # what is kept for later is bounded, and no leak
            seen.append(figures(server))
            told = ", ".join(f"{value} {name}" for name, value in seen[-1]._asdict().items())
            print(f"round {number}: {told}", flush=True)
        after = await metrics_of(http)
    early, late = seen[len(seen) // 3], seen[-1]
    counted = after["generation_tokens_total"] - before["generation_tokens_total"]
    checks = {
        "memory is flat": late.mib - early.mib <= GROWTH_MIB,
        "descriptors are flat": late.descriptors <= early.descriptors + 4,
        "threads are flat": late.threads <= early.threads + 2,
        "helpers are flat": late.helpers <= early.helpers + 2,
        "no request runs or waits": after["num_running_reqs"] == after["num_queue_reqs"] == 0,
        "no page is held": after["num_used_tokens"] == 0,
        "tokens counted are tokens sent": counted == tally["tokens"],
        "all were answered": not set(tally) - {"200", "tokens"},
    }
    for what, holds in checks.items():
        print(f"{'yes' if holds else 'NO':4} {what}")
    return int(not all(checks.values()))


def main(args: list[str]) -> int:
    """`seconds`, then more arguments of the server."""
    with Server(args[1:]) as server:
        return asyncio.run(soak(server, float(args[0]) if args else 120.0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
