"""Prints what the native kernels of TUREEN_CPU_ISA make of given numbers, as tests/kernels/models/results.cpp does.

A line for each operation: its name, and the bytes of what came of it in hexadecimal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6, "Q8_ROW": 8, "BF16": 16,
        "F32": 32, "MXFP4": 4, "IQ4_NL": 4, "IQ4_XS": 4, "Q3_K": 3, "Q2_K": 2, "Q16": 16}  # fmt: skip
MADE_OF_FLOATS = ("Q8_ROW", "Q16", "BF16", "F32")
OUTPUTS, INPUTS, TILE = 56, 1024, 16
ROWS = (1, 2, 5, 9, 37)
COLS = 100
TOKENS, QUERIES, PAGE = 600, 20, 16
LOGITS = 250
# No result is NaN, whose sign is not the same on all processors.
EDGES = (0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, np.inf, 88.5, -88.5, 103.5, -103.5)


def of(isa):
    """Name of an operation -> its bytes, computed by a process that takes this instruction set."""
    return run([sys.executable, str(Path(__file__))], isa)


def run(command, isa):
    """The same of any command that prints results."""
    environment = os.environ | {"TUREEN_CPU_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    if done.returncode:
        raise RuntimeError(f"{command[-1]}, {isa}: {done.stderr}")
    lines = (line.rpartition(" ") for line in done.stdout.splitlines())
    return {name: bytes.fromhex(digits) for name, _, digits in lines}


def differing(some, others):
    """Names of operations whose bytes are not the same, or that one of both lacks."""
    return sorted(name for name in some.keys() | others.keys() if some.get(name) != others.get(name))


def _show(name, array):
    print(name, array.tobytes().hex())


def _make_words(seed, count):
    x = np.arange(count, dtype=np.uint32) + np.array([seed], np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def _make_values(seed, shape, scale):
    whole = (_make_words(seed, int(np.prod(shape))) >> np.uint32(8)).astype(np.int32) - (1 << 23)
    return (whole.astype(np.float32) * np.float32(scale / (1 << 23))).reshape(shape)


def _packed(native, matrix_format, seed):
    floats = _make_values(seed, (OUTPUTS, INPUTS), 4).view(np.uint8).ravel()
    return native.Matrix.pack(native.Pool(1), floats, "F32", matrix_format, OUTPUTS, INPUTS)


def _make_matrix(native, matrix_format, seed):
    if matrix_format in MADE_OF_FLOATS:
        return _packed(native, matrix_format, seed)
    matrix = native.Matrix.blank(matrix_format, OUTPUTS, INPUTS)
    data = _make_words(seed, matrix.nbytes).astype(np.uint8).reshape(-(-OUTPUTS // TILE), -1)
    scales = data[:, INPUTS * TILE * BITS[matrix_format] // 8 :]
    scales[:, 1::2] &= 0xBF  # halves less than 2
    if matrix_format == "MXFP4":
        scales &= 7
    matrix.data[:] = data.ravel()
    return matrix


def _show_products_of(native, matrix, name):
    for rows in ROWS:
        _show(f"{name} {rows}", native.linear(native.Pool(1), _make_values(1, (rows, INPUTS), 4), matrix))


def _show_products(native):
    for seed, matrix_format in enumerate(BITS, 100):
        matrix = _make_matrix(native, matrix_format, seed)
        _show(f"packed {matrix_format}", matrix.data)
        _show_products_of(native, matrix, f"linear {matrix_format}")
        if matrix.inputs == "int8":
            matrix.widen()
            _show_products_of(native, matrix, f"linear int16 {matrix_format}")
    _show("made Q4_1", _packed(native, "Q4_1", 99).data)


def _show_quantized(native):
    for prefix, scale in (("quantize", 4), ("quantize tiny", 2.0**-109)):
        x = _make_values(2, (3, COLS), scale)
        for kind, bits in (
            ("F32", ""),
            ("BF16", ""),
            ("INT8_GROUP", ""),
            ("INT16_GROUP", "int16 "),
            ("WORDS", "words "),
        ):
            for name, array in native.quantize(x, kind).items():
                _show(f"{prefix} {bits}{name}", array)


def _show_rows(native):
    x, wide, weight = (_make_values(*given) for given in ((3, (1, COLS), 4), (4, (1, COLS), 128), (5, (1, COLS), 2)))
    edges = np.array([EDGES], np.float32)
    _show("rms_norm", native.rms_norm(native.Pool(1), x, weight[0], 1e-5))
    _show("silu_mul", native.silu_mul(wide, weight))
    _show("silu_mul edges", native.silu_mul(edges, weight[:, : len(EDGES)].copy()))
    _show("gelu_tanh_mul", native.gelu_tanh_mul(x, weight))
    for name in ("gelu", "quick_gelu"):
        activated = x.copy()
        native.activate(native.Pool(1), activated, name)
        _show(name, activated)
    _show("add", native.add(weight, x))
    _show("rotate", native.rotate(x, wide[:, : COLS // 2].copy(), weight[:, : COLS // 2].copy()))


def _show_attention(native, dtype, dim, values_from):
    cache = native.KvCache([(1, dim, values_from, False)], TOKENS // PAGE + 1, PAGE, dtype)
    keys, values = _make_values(6, (TOKENS, dim), 4), _make_values(7, (TOKENS, dim), 4)
    for t in range(TOKENS):
        native.kv_store(cache, 0, t // PAGE, t % PAGE, 0, keys[t], values[t])
    pages, queries = np.arange(TOKENS // PAGE + 1, dtype=np.int32), np.arange(QUERIES, dtype=np.int32)
    q, scale = _make_values(8, (QUERIES, dim), 4), 1.0 if dim == 38 else 0.125
    for softcap in (0, 30):
        seen = (queries % 3 * 7, queries + (TOKENS - QUERIES + 1))
        out = native.attend(cache, 0, pages, 0, q, *seen, scale, False, float(softcap))
        _show(f"attention {dtype} {dim} {values_from} {softcap}", out)


def _show_sampling(native):
    logits = _make_values(9, (1, LOGITS), 16)
    (peak,), tokens = native.peaks(native.Pool(1), logits)
    _show("peak", tokens)
    softmax = (np.zeros(1, np.int64), np.array([peak]), np.array([0.7]))
    order, ranked, total = native.rank(native.Pool(1), logits, *softmax, LOGITS)
    weights = np.empty(LOGITS)
    weights[order[0]] = ranked[0]
    _show("weights", weights)
    _show("weight sum", total)


def main():
    from tureen.kernels.cpu import native as installed

    native = installed.require()
    _show_products(native)
    _show_quantized(native)
    _show_rows(native)
    for dim in (38, 64):
        for dtype in ("float32", "bfloat16", "int16", "int8", "int4"):
            for values_from in (-1, 6):  # of their own, and a part of the keys
                _show_attention(native, dtype, dim, values_from)
    _show_sampling(native)


if __name__ == "__main__":
    main()
