"""Start each model of the shelf once in each engine mode and ask it one question.

Arguments: names of models, modes, or both, such as `minilm process`; default: all. A model that no package index offers
here is left out with the reason. The exit status is 1 if a model did not answer.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys

from tureen.bench.http import Address, BenchError, ClientConnection
from tureen.bench.process import StartedServer
from tureen.config import Config
from tureen.errors import StartupError
from tureen.fetching.pull import pull
from tureen.fetching.pypi import ELSEWHERE
from tureen.fetching.shelf import shelf

MODES = {
    "thread": "--engine thread",
    "process": "--engine process",
    "replicas": "--replicas 2",
    "api-workers": "--api-workers 2",
    "ranks": "--pipeline-parallel-size 2",
}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4})
QUESTIONS = {"chat": CHAT, "vision": CHAT, "embeddings": ("/v1/embeddings", {"input": "Hello"})}
"""The route and the body for each kind of model."""

HAS_RANKS = ("chat",)
"""The kinds of models that several processes can compute."""


def main(arguments: list[str]) -> int:
    names = [name for name in shelf().models if name in arguments] or list(shelf().models)
    modes = [mode for mode in MODES if mode in arguments] or list(MODES)
    if unknown := set(arguments) - {*shelf().models, *MODES}:
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join([*shelf().models, *MODES])}")
        return 2
    return max([start_in_turn(name, modes) for name in names])


def start_in_turn(name: str, modes: list[str]) -> int:
    """Start a model in each mode. Returns 1 if it did not answer in one of them."""
    try:
        pull(name, Config())
    except StartupError as error:
        is_elsewhere = error.message.endswith(ELSEWHERE)
        print(f"{'left out' if is_elsewhere else 'FAILED'}: {error.message}", flush=True)
        return int(not is_elsewhere)
    status, kind = 0, shelf().models[name].kind
    for mode in modes:
        if mode == "ranks" and kind not in HAS_RANKS:
            continue
        try:
            seconds = asyncio.run(ask(name, kind, MODES[mode]))
        except (BenchError, OSError) as error:
            print(f"FAILED: {name}, {mode}: {error}", flush=True)
            status = 1
        else:
            print(f"{name}, {mode}: ready after {seconds:.0f} s, answers", flush=True)
    return status


async def ask(name: str, kind: str, flags: str) -> float:
    """Start a server, ask it once, and end it. Returns the seconds until it was ready. Raises BenchError, OSError."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = Address(f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "tureen", "serve", "--model-path", name, "--port", str(port), *flags.split()]
    server = StartedServer(shlex.join(command))
    try:
        seconds = await server.ready(address)
        path, body = QUESTIONS[kind]
        connection = ClientConnection(address)
        status, answer = await connection.request("POST", path, json.dumps(body).encode())
        connection.close()
        if status != 200:
            raise BenchError(f"{path} answered {status}: {answer.decode(errors='replace')[:300]}")
        return seconds
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
