import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

native = pytest.importorskip("tureen.kernels.cpu._native")

AVX2 = {"avx2", "fma", "f16c"}
NEEDED = {
    "avx512": AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"},
    "avx2": AVX2,
    "neon": {"asimddp", "asimdhp"},
    "portable": set(),
}
"""Flags that the system names when it lets programs use them; best instruction set first."""

KINDS = {"x86_64": ["avx512", "avx2", "portable"], "aarch64": ["neon", "portable"]}


def _runnable():
    cpuinfo = Path("/proc/cpuinfo").read_text().lower()
    flags = next(line for line in cpuinfo.splitlines() if line.startswith(("flags", "features"))).split()
    return [name for name in KINDS[platform.machine()] if set(flags) >= NEEDED[name]]


def _loaded(variable):
    environment = {key: value for key, value in os.environ.items() if key != "TUREEN_CPU_ISA"}
    if variable is not None:
        environment["TUREEN_CPU_ISA"] = variable
    code = "from tureen.kernels.cpu import native; print(native.load().isa())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("variable", [None, ""])
def test_the_best_instruction_set_that_runs_here_is_taken(variable):
    assert _loaded(variable).stdout.strip() == _runnable()[0]


@pytest.mark.parametrize("name", [*NEEDED, "avx9000", "AVX2", "avx2 "])
def test_the_named_instruction_set_is_taken_or_refused_with_those_that_run(name):
    run = _loaded(name)
    if name in _runnable():
        assert run.stdout.strip() == name, run.stderr
    else:
        assert run.returncode == 1
        assert f"TUREEN_CPU_ISA is {name}; this processor runs: {', '.join(_runnable())}" in run.stderr
