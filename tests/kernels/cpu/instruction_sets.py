"""The instruction sets that the kernels are compiled for, and those that run here, by the flags of the processor."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

native = pytest.importorskip("tureen.kernels.cpu._native")

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDED = {
    "amx": AVX512 | {"avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"},
    "avx512vnni": AVX512 | {"avx512_vnni"},
    "avx512": AVX512,
    "avxvnni": AVX2 | {"avx_vnni"},
    "avx2": AVX2,
    "i8mm": {"asimddp", "asimdhp", "i8mm"},
    "neon": {"asimddp", "asimdhp"},
    "portable": set(),
}
"""Flags that the system names when it lets programs use them; best instruction set first."""
KINDS = {
    "x86_64": ["amx", "avx512vnni", "avx512", "avxvnni", "avx2", "portable"],
    "aarch64": ["i8mm", "neon", "portable"],
}
ONLY_BY_NAME = {"amx", "i8mm"}
"""Never run on a processor that has them."""


def runnable():
    cpuinfo = Path("/proc/cpuinfo").read_text().lower()
    flags = next(line for line in cpuinfo.splitlines() if line.startswith(("flags", "features"))).split()
    built = {name for name, _, _ in native.isas()}  # a compiler may not know all
    return [name for name in KINDS[platform.machine()] if name in built and set(flags) >= NEEDED[name]]
