"""The jail: a process for one processor that a client sent. Nowhere else is anything of a client unpickled."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import mmap
import os
import resource
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import dill
import msgspec
import numpy as np
import torch

from tureen.jail import seccomp, wire

MEMORY_BYTES = 512 << 20
MAX_DEPTH = 500

_decoder = msgspec.msgpack.Decoder(wire.ToWorker)


class Rejected(Exception):
    """The payload holds no processor."""


class Nowhere(io.TextIOBase):
    """What a processor prints."""

    def write(self, text: str, /) -> int:
        return len(text)


def main(connection: socket.socket, memory: int, rows: int, width: int) -> NoReturn:
    """Give up all rights, then load and run what comes. Never returns."""
    shared = mmap.mmap(memory, rows * width * 4)
    logits = torch.frombuffer(shared, dtype=torch.float32).view(rows, width)
    try:
        _lock_in(connection.fileno())
        _serve(connection, logits)
    finally:
        os._exit(1)


def _lock_in(keep: int) -> None:
    seccomp.control(seccomp.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
    os.chdir("/")
    os.environ.clear()
    sys.stdin = None
    sys.stdout = sys.stderr = Nowhere()
    os.closerange(0, keep)
    os.closerange(keep + 1, 1 << 16)
    sys.setrecursionlimit(MAX_DEPTH)
    with open("/proc/self/statm", "rb") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, size + MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, keep + 1),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (wire.CPU_STEP_S, resource.RLIM_INFINITY))  # what the pool may raise
    seccomp.control(seccomp.PR_SET_DUMPABLE, 0)
    seccomp.lock_in()
    with contextlib.suppress(PermissionError):
        os.open("/", os.O_RDONLY)
        os._exit(1)  # a filter that does not hold: nothing of a client may run here


def _serve(connection: socket.socket, logits: torch.Tensor) -> None:
    processor: Any = None
    sequences: dict[int, dict[str, Any]] = {}
    while True:
        header = wire.receive(connection, wire.HEADER.size)
        payload = None if header is None else wire.receive(connection, wire.HEADER.unpack(header)[0])
        if payload is None:
            os._exit(0)
        message = _decoder.decode(payload)
        number = message.number if isinstance(message, wire.Run) else 0
        try:
            if isinstance(message, wire.Load):
                processor = _load(message.payload)
            else:
                _run(processor, message, sequences, logits)
            answer = wire.reply(number, wire.DONE)
        except Rejected as error:
            answer = wire.reply(number, wire.REJECTED, str(error))
        except BaseException as error:  # noqa: BLE001 - whatever a client's code raises is its own failure
            status = wire.REJECTED if isinstance(message, wire.Load) else wire.FAILED
            answer = wire.reply(number, status, f"{type(error).__name__}: {error}")
        connection.sendall(answer)


def _load(payload: str) -> Any:
    kind = dill.loads(bytes.fromhex(json.loads(payload)["callable"]))  # noqa: S301 - this is the jail
    processor = kind() if isinstance(kind, type) else None
    if not callable(processor):
        raise Rejected("it is not a class with __call__(self, logits, custom_param_list)")
    return processor


def _run(processor: Any, message: wire.Run, sequences: dict[int, dict[str, Any]], logits: torch.Tensor) -> None:
    for number in message.dropped:
        sequences.pop(number, None)
    for one in message.new:
        request = SimpleNamespace(origin_input_ids=one.prompt_ids, output_ids=one.output_ids)
        sequences[one.number] = json.loads(one.params) | {"__req__": request}
    params = []
    for number, new_ids in message.rows:
        sequences[number]["__req__"].output_ids += new_ids
        params.append(sequences[number])
    given = logits[: len(params)]
    result = processor(given, params)
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"it returned {type(result).__name__}, not a tensor")
    if result.shape != given.shape:
        raise ValueError(f"it returned the shape {list(result.shape)}, not {list(given.shape)}")
    if result.data_ptr() != given.data_ptr() or result.dtype is not torch.float32:
        given.copy_(result)


def warm_up() -> None:
    """Do once, in the zygote, what loads modules or starts threads at its first use: no file opens in the jail."""
    torch.set_num_threads(1)
    logits = torch.zeros(2, 8)
    logits[0, :] = -float("inf")
    logits[0, [1, 2]] = 0.0
    torch.topk(torch.softmax(logits, -1), 2)
    torch.from_numpy(np.zeros(2, dtype=np.float32)).sort()
    logits.masked_fill_(logits > 1, 0.0).scatter_(1, torch.tensor([[0], [1]]), 1.0)
    np.linalg.svd(np.eye(2)), np.random.default_rng(0).normal()
    str(logits), logits.cumsum(-1), logits.argmax(-1).tolist(), torch.where(logits > 0)
    with torch.no_grad():
        (logits * 2).log_softmax(-1)
    dill.loads(dill.dumps(type("Warm", (), {"__call__": lambda self: None, "__module__": "__main__"})))  # noqa: S301
    ctypes.CDLL(None, use_errno=True)
    gc.freeze()
