"""The instruction set that a process takes: the best that runs here, or the one that TUREEN_CPU_ISA names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "cpu"))
from instruction_sets import NEEDED, ONLY_BY_NAME, runnable

GUARDS = ("kernels",)


def _loaded(variable):
    environment = {key: value for key, value in os.environ.items() if key != "TUREEN_CPU_ISA"}
    if variable is not None:
        environment["TUREEN_CPU_ISA"] = variable
    code = "from tureen.kernels.cpu import native; print(native.load().isa())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("variable", [None, ""])
def test_the_best_instruction_set_that_runs_here_is_taken(variable):
    best = next(name for name in runnable() if name not in ONLY_BY_NAME)
    assert _loaded(variable).stdout.strip() == best


@pytest.mark.parametrize("name", [*NEEDED, "avx9000", "AVX2", "avx2 "])
def test_the_named_instruction_set_is_taken_or_refused_with_those_that_run(name):
    run = _loaded(name)
    if name in runnable():
        assert run.stdout.strip() == name, run.stderr
    else:
        assert run.returncode == 1
        assert f"TUREEN_CPU_ISA is {name}; this processor runs: {', '.join(runnable())}" in run.stderr
