"""All instruction sets that round a product and a sum once give the same bits.

In a build with models of instructions (tools/check_native.py) these are all, and `portable`, plain C++, is what the
others are held to.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import results

GUARDS = ("kernels",)

native = pytest.importorskip("tureen.kernels.cpu._native")

CPU = Path("/proc/cpuinfo").read_text(encoding="utf-8")
HAS_MODELS = Path(native.__file__).parent.name == "models"
FUSED = [name for name, runs, _ in native.isas() if runs and (HAS_MODELS or name != "portable")]
# Its instruction for BF16 sums in an order of its own; test_native_linear.py compares with float64.
OWN_ORDER = {"amx": [f"linear BF16 {rows}" for rows in sorted(results.ROWS, key=str)]}


@pytest.fixture(scope="module")
def expected():
    return results.of(FUSED[-1])


@pytest.mark.parametrize("isa", FUSED[:-1])
def test_an_instruction_set_computes_the_bits_that_the_plainest_computes(isa, expected):
    assert results.differing(results.of(isa), expected) == OWN_ORDER.get(isa, [])


@pytest.mark.skipif(not HAS_MODELS, reason="this build has no models of instructions")
@pytest.mark.skipif("avx512_vnni" not in CPU, reason="the models need AVX-512 with VNNI")
def test_with_models_every_instruction_set_of_the_build_runs():
    assert all(runs for _, runs, _ in native.isas())
    assert FUSED[-1] == "portable"
