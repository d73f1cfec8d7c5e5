import os
import platform
import subprocess
import sys
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


def _runnable():
    cpuinfo = Path("/proc/cpuinfo").read_text().lower()
    flags = next(line for line in cpuinfo.splitlines() if line.startswith(("flags", "features"))).split()
    built = {name for name, _, _ in native.isas()}  # a compiler may not know all
    return [name for name in KINDS[platform.machine()] if name in built and set(flags) >= NEEDED[name]]


def _loaded(variable):
    environment = {key: value for key, value in os.environ.items() if key != "TUREEN_CPU_ISA"}
    if variable is not None:
        environment["TUREEN_CPU_ISA"] = variable
    code = "from tureen.kernels.cpu import native; print(native.load().isa())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("variable", [None, ""])
def test_the_best_instruction_set_that_runs_here_is_taken(variable):
    best = next(name for name in _runnable() if name not in ONLY_BY_NAME)
    assert _loaded(variable).stdout.strip() == best


@pytest.mark.parametrize("name", [*NEEDED, "avx9000", "AVX2", "avx2 "])
def test_the_named_instruction_set_is_taken_or_refused_with_those_that_run(name):
    run = _loaded(name)
    if name in _runnable():
        assert run.stdout.strip() == name, run.stderr
    else:
        assert run.returncode == 1
        assert f"TUREEN_CPU_ISA is {name}; this processor runs: {', '.join(_runnable())}" in run.stderr


def test_each_instruction_set_says_whether_it_runs_here_and_whether_it_is_taken_unnamed():
    kind = [name for name in KINDS[platform.machine()] if name in {name for name, _, _ in native.isas()}]
    assert [name for name, _, _ in native.isas()] == kind
    assert {"avx2", "neon"} & set(kind)
    assert [name for name, runs, _ in native.isas() if runs] == _runnable()
    assert {name for name, _, by_default in native.isas() if not by_default} == ONLY_BY_NAME & set(kind)
