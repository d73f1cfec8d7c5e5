import platform

import pytest
from instruction_sets import KINDS, ONLY_BY_NAME, runnable

native = pytest.importorskip("tureen.kernels.cpu._native")


def test_each_instruction_set_says_whether_it_runs_here_and_whether_it_is_taken_unnamed():
    kind = [name for name in KINDS[platform.machine()] if name in {name for name, _, _ in native.isas()}]
    assert [name for name, _, _ in native.isas()] == kind
    assert {"avx2", "neon"} & set(kind)
    assert [name for name, runs, _ in native.isas() if runs] == runnable()
    assert {name for name, _, by_default in native.isas() if not by_default} == ONLY_BY_NAME & set(kind)
