"""The instruction sets of 64-bit ARM, emulated, against those of this processor."""

from __future__ import annotations

import os
import subprocess

import arm
import pytest
import results

GUARDS = ("kernels",)

native = pytest.importorskip("tureen.kernels.cpu._native")


@pytest.fixture(scope="module", autouse=True)
def _program():
    arm.build()


@pytest.fixture(scope="module")
def expected():
    fused = [name for name, runs, _ in native.isas() if runs and name != "portable"]
    if not fused:
        pytest.skip("no instruction set of this processor rounds a product and a sum once, as ARM's do")
    return results.of(fused[-1])


@pytest.mark.parametrize("isa", ["neon", "i8mm", "portable"])
def test_arm_computes_the_bits_that_this_processor_computes(isa, expected):
    assert results.differing(results.run(arm.command(), isa), expected) == []


def _run(processor, isa):
    environment = os.environ | {"TUREEN_CPU_ISA": isa}
    return subprocess.run(arm.command(processor), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("processor", "taken"), [("cortex-a72", "portable"), ("cortex-a76", "neon"), ("max", "neon")])
def test_an_arm_processor_takes_what_it_has_and_what_has_run_on_one(processor, taken):
    assert _run(processor, "").stderr.decode().split() == [taken]


def test_an_arm_processor_without_matrix_products_refuses_i8mm_by_name():
    run = _run("cortex-a76", "i8mm")
    assert run.returncode == 1
    assert run.stderr.decode().strip() == "TUREEN_CPU_ISA is i8mm; this processor runs: neon, portable"
