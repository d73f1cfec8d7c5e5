"""What a client sends in place of a processor: its form in the front, its pickle in the sandbox."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json

import numpy as np

from tureen.config import Config
from tureen.fields.processor import check_processor
from tureen.logit_processor import CustomLogitProcessor
from tureen.sampling.processor_pool import ProcessorBatch, ProcessorError, ProcessorPool, Tracked

HELD = contextlib.ExitStack()
"""What lives until all that is fuzzed here is."""

ROWS, VOCABULARY = 2, 16
CONFIG = Config(enable_custom_logit_processor=True)
NUMBERS = itertools.count()
"""Of clients: one whose code hangs is refused for a while."""


@functools.cache
def pool() -> ProcessorPool:
    return HELD.enter_context(contextlib.closing(ProcessorPool(ROWS, VOCABULARY)))


@functools.cache
def proper() -> str:
    """One that adds 1, as a client's script sends it."""
    scope = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor}
    exec(
        "class AddOne(CustomLogitProcessor):\n    def __call__(self, logits, params):\n        return logits + 1\n",
        scope,
    )
    payload: str = scope["AddOne"].to_str()  # type: ignore[attr-defined]
    return payload


def call(payload: str, client: str) -> np.ndarray | ProcessorError:
    """What becomes of a row of zeros in a worker of this client's."""
    lease = pool().acquire(client, payload)
    lease.is_settled.wait()
    [result] = pool().run([ProcessorBatch(lease.key, np.zeros((1, VOCABULARY), np.float32), [Tracked(0, {}, [1], [])])])
    pool().release(lease)
    pool().end_idle()
    return result


def field(data: bytes) -> None:
    """The field's text as it comes in a body."""
    check_processor(data.decode("utf-8", "replace"), CONFIG, "custom_logit_processor")


def pickle(data: bytes) -> None:
    """A pickle: whatever it does, logits or an error come back, and another client's processor works."""
    result = call(json.dumps({"callable": data.hex()}), f"client {next(NUMBERS)}")
    assert isinstance(result, ProcessorError) or result.shape == (1, VOCABULARY)
    working = call(proper(), "another")
    assert not isinstance(working, ProcessorError), working
    assert (working == 1).all()
