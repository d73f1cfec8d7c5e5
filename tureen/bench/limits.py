"""The limits of a machine: how fast it reads memory and multiplies, and the tokens a second that the default model can
reach with that."""

from __future__ import annotations

from types import ModuleType

import msgspec

CONTEXT = 256
"""Tokens of context that a stream has when its speed is computed."""
PROMPT = 512
READ_BYTES = 96 << 20  # about what a token of the default model reads
READINGS = 3
PEAK_SECONDS = 0.1
ONE_CORE = 1.25
"""Processors that together do less than this many times the work of one count as one core."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a decoder: bytes read and multiplications."""

    model: str
    weight_bytes: int  # read for each token: layers and head
    kv_bytes: int  # of the cache, for each token that stands before
    weights: int  # of the layers' matrices
    head_weights: int
    attention: int  # layers x heads x head_dim

    def bytes_per_token(self, context: int) -> int:
        """Returns the bytes read for one token of one stream that has `context` tokens behind it."""
        return self.weight_bytes + self.kv_bytes * context

    def operations_per_token(self, prompt: int) -> float:
        """Returns the products and sums for each token of a prompt, of which the last alone needs the head."""
        seen = (prompt + 1) / 2  # tokens that one attends to, on average
        return 2 * self.weights + 4 * self.attention * seen + 2 * self.head_weights / prompt


DEFAULT_WORK = Work(
    model="smollm2:135m",
    weight_bytes=96_576_768,
    kv_bytes=23_760,
    weights=106_168_320,
    head_weights=49_152 * 576,
    attention=30 * 9 * 64,
)
"""The work of the default model as it is published, with default settings."""


class Measured(msgspec.Struct, frozen=True):
    """The speeds that were measured with a number of threads."""

    threads: int
    read_gb_s: float
    int8_gops: float


class Allowed(msgspec.Struct, frozen=True):
    """The tokens a second that a machine allows at most."""

    single: float
    prefill: float


def measure(kernels: ModuleType, threads: int) -> list[Measured]:
    """Measures with one thread, and with all. Takes a few tenths of a second."""
    measurements = []
    for count in sorted({1, threads}):
        read = kernels.read_bandwidth(count, READ_BYTES, READINGS)
        measurements.append(Measured(count, read, kernels.peak(count, PEAK_SECONDS)))
    return measurements


def allowed(work: Work, measured: list[Measured]) -> Allowed:
    """Returns the limits by the best measurement, whichever number of threads it had."""
    gb_s = max(measurement.read_gb_s for measurement in measured)
    gops = max(measurement.int8_gops for measurement in measured)
    return Allowed(gb_s * 1e9 / work.bytes_per_token(CONTEXT), gops * 1e9 / work.operations_per_token(PROMPT))


def scaling(single_thread: float, all_threads: float) -> str:
    """Returns how much more several threads do than one, in words."""
    return (
        f"{all_threads / single_thread:.1f} times as much as with one"
        if all_threads > single_thread
        else "no more than with one"
    )


def is_like_one_core(measured: list[Measured]) -> bool:
    """Says whether several threads compute hardly more than one.

    That is so where CPUs share a core, and where other processes keep them busy.
    """
    single, most = measured[0], measured[-1]
    return most.threads > 1 and most.int8_gops < ONE_CORE * single.int8_gops
