"""Measures from which length of a prompt it pays to have it computed elsewhere, and what streams feel of a long one.

`python bench/handover.py OUT.json [MODEL]`: starts servers of two replicas, of one thread each, one after the other.
Processor time is that of the engines' processes, so that a busy machine disturbs it little; times of the clock are
given beside it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4000)
NUM_ROUNDS = 3
NUM_OUTPUT = 4
STREAMS, STREAM_TOKENS, LONG_PROMPT = 4, 3000, 4000
PATIENCE_S = 900
SETTLE_S = 0.5
"""Seconds after an answer in which its pages are saved."""

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class BenchServer:
    """A server of two replicas. `engines`: their processes, in order."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "tureen", "serve", "--port", "0", "--num-threads", "1", "--replicas", "2"]
        self._process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if address := re.search(r"ready at (http://[^\s/]+)", line):
                self.url = address[1]
                break
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        listed = [word for task in tasks for word in task.read_text().split()]
        self.engines = sorted(pid for pid in map(int, listed) if b"serving.child" in _command_line(pid))
        assert len(self.engines) == 2

    def __enter__(self) -> BenchServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, token_ids: list[int], num_tokens: int = NUM_OUTPUT) -> tuple[list[float], float, list[int]]:
        """Returns the processor time that each engine took for a prompt, the seconds of the clock, and the output."""
        before = list(map(processor_s, self.engines))
        began_s = time.monotonic()
        answer = self.client.post("/generate", json=_body(token_ids, num_tokens)).raise_for_status().json()
        seconds = time.monotonic() - began_s
        time.sleep(SETTLE_S)
        after = list(map(processor_s, self.engines))
        return [end - start for start, end in zip(before, after, strict=True)], seconds, answer["output_ids"]


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def processor_s(pid: int) -> float:
    """Returns the processor time of a process, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _body(token_ids: list[int], num_tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": token_ids, "sampling_params": params}


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(num_tokens)]


def by_length(flags: list[str]) -> list[dict[str, float]]:
    """Returns, for each length, what a prompt costs that is handed over, and one that is computed where it is
    answered."""
    rng, rows = random.Random(1), []
    with BenchServer(*flags, "--prefill-replicas", "1", "--prefill-min-tokens", "16") as server:
        server.ask(_prompt(rng, 600))
        for length in LENGTHS:
            figures: dict[str, list[float]] = {}
            for _ in range(NUM_ROUNDS):
                prompt = _prompt(rng, length)
                handed, handed_s, output = server.ask(prompt)
                cached, cached_s, again = server.ask(prompt)
                assert output == again
                server.client.post("/replicas/drain", json={"replica": 0}).raise_for_status()
                own, own_s, _ = server.ask(_prompt(rng, length))
                server.client.post("/replicas/undrain", json={"replica": 0}).raise_for_status()
                round_of = {
                    "answering_cpu_s_computed": own[1],
                    "answering_cpu_s_handed": handed[1],
                    "answering_cpu_s_cached": cached[1],
                    "prefill_cpu_s": handed[0],
                    "seconds_computed": own_s,
                    "seconds_handed": handed_s,
                    "seconds_cached": cached_s,
                }
                for name, value in round_of.items():
                    figures.setdefault(name, []).append(value)
            rows.append({"tokens": length} | {name: statistics.median(values) for name, values in figures.items()})
            print(rows[-1], flush=True)
    return rows


def _follow(
    url: str, prompt: list[int], times: list[float], has_begun: threading.Semaphore, is_over: threading.Event
) -> None:
    body = _body(prompt, STREAM_TOKENS) | {"stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                if len(times) == 20:
                    has_begun.release()
                if is_over.is_set():
                    return


def gaps(flags: list[str], seed: int) -> dict[str, float]:
    """Returns the gaps between tokens of streams while a long prompt is answered, in milliseconds.

    seed: of prompts that no run before had.
    """
    rng = random.Random(seed)
    with BenchServer(*flags) as server:
        server.ask(_prompt(rng, 600))
        server.ask(_prompt(rng, 600))
        times: list[list[float]] = [[] for _ in range(STREAMS)]
        has_begun, is_over = threading.Semaphore(0), threading.Event()
        threads = [
            threading.Thread(target=_follow, args=(server.url, _prompt(rng, 24), each, has_begun, is_over))
            for each in times
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            has_begun.acquire()
        began_s = time.monotonic()
        server.client.post("/generate", json=_body(_prompt(rng, LONG_PROMPT), NUM_OUTPUT)).raise_for_status()
        ended_s = time.monotonic()
        is_over.set()
        for thread in threads:
            thread.join()
    between = sorted(
        1000 * (after - before)
        for each in times
        for before, after in itertools.pairwise(each)
        if after > began_s and before < ended_s
    )
    return {
        "median_ms": statistics.median(between),
        "p99_ms": between[int(0.99 * len(between))],
        "longest_ms": between[-1],
        "long_prompt_s": ended_s - began_s,
        "tokens_meanwhile": len(between),
        "streams_that_ended_before": sum(len(each) == STREAM_TOKENS and each[-1] < ended_s for each in times),
    }


def main() -> None:
    out, model = Path(sys.argv[1]), sys.argv[2:]
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg(), "model": model or "default"}
    with tempfile.TemporaryDirectory() as folder:
        kept = [*model, "--kv-disk", f"{folder}/kv"]
        result["by_length"] = by_length(kept)
        result["gaps_without_roles"] = [gaps(kept, 2 + number) for number in range(NUM_ROUNDS)]
        roles = [*kept, "--prefill-replicas", "1"]
        result["gaps_with_roles"] = [gaps(roles, 20 + number) for number in range(NUM_ROUNDS)]
    result["load_after"] = os.getloadavg()
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
