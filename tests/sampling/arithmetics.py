"""The arithmetic that a test of the sampler runs with, and its kind of logits; see the fixture `each_arithmetic`."""

from __future__ import annotations

import numpy as np
import pytest

from tureen.sampling.native_arithmetic import NativeArithmetic
from tureen.sampling.sampler import Sampler
from tureen.sampling.torch_arithmetic import TorchArithmetic

_held = {}


def hold(kind):
    """Use this one from now on. Skips the test where the native kernels are missing."""
    if kind == "torch":
        _held["now"] = TorchArithmetic("cpu")
    else:
        native = pytest.importorskip("tureen.kernels.cpu._native", reason="the native kernels are not built")
        _held["now"] = NativeArithmetic(native.Pool(2))


def arithmetic():
    return _held["now"]


def make_sampler(max_rows, vocab_size, processors=None):
    return Sampler(max_rows, vocab_size, arithmetic(), processors)


def make_rows(values):
    """Values [rows, vocab] as logits of their own."""
    return arithmetic().adopt(np.array(values, dtype=np.float32))


def make_array(logits):
    """Logits as an array of its own."""
    return np.stack([arithmetic().host_row(logits, row) for row in range(len(logits))])
