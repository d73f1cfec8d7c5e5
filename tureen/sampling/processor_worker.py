"""A fork server whose workers run the code of one client each.

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

from tureen.extras import is_installed
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
    kind = _kind_of_logits()
    warm_up(kind)

    def open_(descriptors: Sequence[int]) -> Handle:
        shared = mmap.mmap(descriptors[0], shape.rows * shape.width * 4)
        logits = kind.from_array(np.frombuffer(shared, dtype=np.float32).reshape(shape.rows, shape.width))
        sys.stdout = sys.stderr = NullStream()
        sys.setrecursionlimit(MAX_DEPTH)
        return LoadedProcessor(logits, kind).handle

    return Program(messages.LIMITS, open_)


class LoadedProcessor:
    """A client's loaded processor, and the sequences that it knows."""

    def __init__(self, logits: Any, kind: ModuleType) -> None:
        """logits: what `from_array` of the module `kind` made of the memory that is shared with the engine."""
        self._logits = logits
        self._kind = kind
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
                self._kind.take_over(*_run(self._call, message, self._sequences, self._logits))
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


def _run(
    processor: Any, message: messages.RunRows, sequences: dict[int, dict[str, Any]], logits: Any
) -> tuple[Any, Any]:
    """Returns what the processor returned, and the rows that it is for."""
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
    return processor(rows, params), rows


def _kind_of_logits() -> ModuleType:
    """Returns the module that makes what processors get: tensors where torch is installed."""
    if is_installed("torch"):
        globals()["torch"] = importlib.import_module("torch")
        return importlib.import_module("tureen.sampling.tensor_logits")
    stand_ins = importlib.import_module("tureen.sampling.array_module").modules()
    sys.modules.update(stand_ins)
    globals()["torch"] = stand_ins["torch"]
    return importlib.import_module("tureen.sampling.array_logits")


def warm_up(kind: ModuleType) -> None:
    """Does once, before any fork, what loads modules or starts threads at its first use: workers open no files."""
    kind.warm_up()
    np.linalg.svd(np.eye(2)), np.random.default_rng(0).normal()
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
