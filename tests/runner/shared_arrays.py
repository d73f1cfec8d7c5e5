"""Arrays in shared memory, and whether that memory is in use."""

import os

import numpy as np

VALUES = np.arange(4096, dtype=np.float32)


def array() -> dict:
    return {"a": VALUES.copy()}


def never() -> dict:
    raise AssertionError("the weights are made though they are there")


def is_empty(shared) -> bool:
    return os.fstat(shared.descriptor).st_blocks == 0
