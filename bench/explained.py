"""Measures what explained tokens cost of whole steps.

`python bench/explained.py OUT.json [NAME=COMMAND …]`: starts a server of the default model with one thread, or one by
each command, and asks for the same 16 outputs in turns, explained and not. What is compared is the server's processor
time, of all its threads, requests and their JSON included, so that a busy machine disturbs it little.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

PARAMS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "temperature 0.7, top_p": {"temperature": 0.7, "top_p": 0.9},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top_p, two penalties": {
        "temperature": 0.7,
        "top_p": 0.9,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
    },
    "temperature 0.7, top_p, three penalties": {
        "temperature": 0.7,
        "top_p": 0.9,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
}
NUM_SEQUENCES, NUM_OUTPUT, NUM_ROUNDS = 16, 24, 12
SUBJECTS = (
    "rivers", "bread", "the moon", "glass", "bees", "winter", "bridges", "salt", "maps", "clocks", "paper", "wolves",
    "copper", "tides", "gardens", "ink",
)  # fmt: skip
PATIENCE_S = 600


class BenchServer:
    """A server with one thread, and a client for each sequence."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            [*command, "--port", "0", "--num-threads", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if address := re.search(r"ready at (http://[^\s/]+)", line):
                break
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        limits = httpx.Limits(max_connections=NUM_SEQUENCES)
        self._client = httpx.Client(base_url=address[1], timeout=PATIENCE_S, limits=limits)
        self._askers = ThreadPoolExecutor(NUM_SEQUENCES)

    def __enter__(self) -> BenchServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def processor_s(self) -> float:
        """Returns the processor time of all threads so far."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9

    def ask(self, params: dict[str, Any], *, explain: bool) -> tuple[float, list[list[int]]]:
        """Returns the processor time of a step, in milliseconds, and the outputs."""
        before = self.processor_s()
        outputs = list(self._askers.map(lambda number: self._output(number, params, explain), range(NUM_SEQUENCES)))
        return 1000 * (self.processor_s() - before) / NUM_OUTPUT, outputs

    def _output(self, number: int, params: dict[str, Any], explain: bool) -> list[int]:
        limits = {"max_new_tokens": NUM_OUTPUT, "ignore_eos": True, "sampling_seed": number}
        text = f"Once there was a town that was known for {SUBJECTS[number]}. People came from far away to see"
        body = {"text": text, "sampling_params": params | limits, "explain": explain}
        answer = self._client.post("/generate", json=body).raise_for_status().json()
        assert len(answer["meta_info"].get("explanations", ())) == (NUM_OUTPUT if explain else 0)
        ids: list[int] = answer["output_ids"]
        return ids


def measure(servers: dict[str, BenchServer], params: dict[str, Any]) -> dict[str, Any]:
    """Returns for each server the milliseconds of a step with and without explanations, and how they compare."""
    outputs: list[list[int]] = []
    for server in servers.values():
        _, outputs = server.ask(params, explain=True)  # the prompts are in the prefix cache from now on
    steps: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in servers}
    for number in range(NUM_ROUNDS):
        for name, server in servers.items():
            for is_explained in (False, True) if number % 2 else (True, False):
                step_ms, again = server.ask(params, explain=is_explained)
                assert again == outputs
                steps[name][is_explained].append(round(step_ms, 3))
    return {name: compared(*of_server) for name, of_server in steps.items()}


def compared(plain: list[float], explained: list[float]) -> dict[str, Any]:
    """Returns what explanations add to a step, of which there are as many with them as without."""
    ratios = [above / below for above, below in zip(explained, plain, strict=True)]
    return {
        "median_of_ratios": round(statistics.median(ratios), 4),
        "ratio_of_medians": round(statistics.median(explained) / statistics.median(plain), 4),
        "ratio_of_least": round(min(explained) / min(plain), 4),
        "plain_step_ms": plain,
        "explained_step_ms": explained,
    }


def main() -> None:
    out, commands = Path(sys.argv[1]), sys.argv[2:] or [f"now={sys.executable} -m tureen serve"]
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()}
    with contextlib.ExitStack() as stack:
        servers = {}
        for command in commands:
            name, _, line = command.partition("=")
            servers[name] = stack.enter_context(BenchServer(shlex.split(line)))
        for name, params in PARAMS.items():
            result[name] = measure(servers, params)
            for server, figures in result[name].items():
                print(name, server, {key: value for key, value in figures.items() if not isinstance(value, list)})
            sys.stdout.flush()
    result["load_after"] = os.getloadavg()
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
