"""`python -I -m tureen.sampling.processor_worker`: a fork server whose workers run the code of one client each.

A client's bytes are unpickled in these workers and nowhere else.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import mmap
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import dill
import msgspec
import numpy as np
import numpy.random
import torch

from tureen.logit_processor import SGLANG_MODULE, CustomLogitProcessor
from tureen.sampling import processor_messages as messages
from tureen.sampling import sglang_processors
from tureen.sandbox import fork_server
from tureen.sandbox.fork_server import Handle, Program

MAX_DEPTH = 500
COMMON = ("bisect", "collections", "copy", "dataclasses", "enum", "functools", "heapq", "itertools", "json", "math",
          "operator", "random", "re", "statistics", "string", "time", "typing")  # fmt: skip
"""Modules that client code may import: nothing else can be loaded in the sandbox."""

_decoder = msgspec.msgpack.Decoder(messages.ToWorker)


class Rejected(Exception):
    """The payload holds no processor that can be run."""


class NullStream(io.TextIOBase):
    """A text stream that drops what a processor prints."""

    def write(self, text: str, /) -> int:
        return len(text)


def program(setup: bytes) -> Program:
    """Returns the program of the workers; setup: a LogitsShape as msgpack."""
    shape = msgspec.msgpack.decode(setup, type=messages.LogitsShape)
    _stand_in_for_sglang()
    warm_up()

    def open_(descriptors: Sequence[int]) -> Handle:
        shared = mmap.mmap(descriptors[0], shape.rows * shape.width * 4)
        logits = torch.frombuffer(shared, dtype=torch.float32).view(shape.rows, shape.width)
        sys.stdout = sys.stderr = NullStream()
        sys.setrecursionlimit(MAX_DEPTH)
        return LoadedProcessor(logits).handle

    return Program(messages.LIMITS, open_)


class LoadedProcessor:
    """A client's loaded processor, and the sequences that it knows."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._call: Any = None
        self._sequences: dict[int, dict[str, Any]] = {}

    def handle(self, data: bytes) -> bytes:
        """Carries out one message and returns the reply."""
        message = _decoder.decode(data)
        number = message.number if isinstance(message, messages.RunRows) else 0
        try:
            if isinstance(message, messages.LoadCode):
                self._call = _load(message.payload)
            else:
                _run(self._call, message, self._sequences, self._logits)
            return messages.reply(number, messages.DONE)
        except Rejected as error:
            return messages.reply(number, messages.REJECTED, str(error))
        except BaseException as error:  # noqa: BLE001 - whatever a client's code raises is its own failure
            status = messages.REJECTED if isinstance(message, messages.LoadCode) else messages.FAILED
            return messages.reply(number, status, f"{type(error).__name__}: {error}")


def _load(payload: str) -> Any:
    loaded = dill.loads(bytes.fromhex(json.loads(payload)["callable"]))  # noqa: S301 - this is the sandbox
    is_object = isinstance(loaded, CustomLogitProcessor)  # SGLang 0.4.3 sent these in place of classes
    processor = loaded() if isinstance(loaded, type) else loaded if is_object else None
    if not callable(processor):
        raise Rejected("it is not a class with __call__(self, logits, custom_param_list)")
    return processor


def _run(processor: Any, message: messages.RunRows, sequences: dict[int, dict[str, Any]], logits: torch.Tensor) -> None:
    for number in message.dropped:
        sequences.pop(number, None)
    for sequence in message.new:
        request = SimpleNamespace(origin_input_ids=sequence.prompt_ids, output_ids=sequence.output_ids)
        sequences[sequence.number] = json.loads(sequence.params) | {"__req__": request}
    params = []
    for number, new_ids in message.rows:
        sequences[number]["__req__"].output_ids += new_ids
        params.append(sequences[number])
    rows = logits[: len(params)]
    result = processor(rows, params)
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"it returned {type(result).__name__}, not a tensor")
    if result.shape != rows.shape:
        raise ValueError(f"it returned the shape {list(result.shape)}, not {list(rows.shape)}")
    if result.data_ptr() != rows.data_ptr() or result.dtype is not torch.float32:
        rows.copy_(result)


def warm_up() -> None:
    """Does once, before any fork, what loads modules or starts threads at its first use: workers open no files."""
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


def _stand_in_for_sglang() -> None:
    """Makes the modules that a class pickled by SGLang's client refers to, with all that SGLang ships in them."""
    parts = SGLANG_MODULE.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        sys.modules[name] = ModuleType(name)
    for kind in vars(sglang_processors).values():
        if isinstance(kind, type) and issubclass(kind, CustomLogitProcessor):
            setattr(sys.modules[SGLANG_MODULE], kind.__name__, kind)


if __name__ == "__main__":
    for _name in COMMON:  # a class of a client's main module finds the globals it uses here: torch, np, math, …
        globals()[_name] = importlib.import_module(_name)
    fork_server.main(program)
