"""Every instruction set that runs here packs the same bytes and draws the same tokens, each in a process of its own."""

import os
import subprocess
import sys

import pytest

GUARDS = ("kernels",)

native = pytest.importorskip("tureen.kernels.cpu._native")


DIGEST = """
import hashlib, sys
import numpy as np
from tureen.kernels.cpu import _native as native

values = np.random.default_rng(10).standard_normal((37, 300), np.float32)
values *= 10.0 ** np.random.default_rng(11).integers(-9, 9, (37, 300)).astype(np.float32)
values[3, 5], values[20, :64] = np.nan, 0
for matrix_format in ("F32", "BF16", "Q8_ROW", "Q16", "Q4_1"):
    packed = native.Matrix.pack(native.Pool(2), values.view(np.uint8).reshape(-1), "F32", matrix_format, 37, 300)
    print(hashlib.sha256(packed.data).hexdigest())
"""


def test_floats_are_packed_into_the_same_bytes_with_every_instruction_set():
    found = {}
    for name in [name for name, runs, _ in native.isas() if runs]:
        environment = os.environ | {"TUREEN_CPU_ISA": name}
        run = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        found[name] = run.stdout
    assert "portable" in found
    assert len(set(found.values())) == 1, found


SCRIPT = """
import numpy as np
from tureen.kernels.cpu import _native as native
pool, logits = native.Pool(1), np.random.default_rng(0).normal(0, 3, (3, 5001)).astype(np.float32)
values, tokens = native.peaks(pool, logits)
logits[2, 7:5000:3] = -np.inf
mask = np.arange(157, dtype=np.uint32) * 0x9E3779B9
arguments = np.arange(3), values, np.array([0.3, 1.0, 2.0])
print(native.isa(), tokens.tolist(), native.greedy(pool, logits, [mask, None, mask]),
      native.draw(pool, logits, *arguments, np.array([0.1, 0.5, 0.9])).tolist(),
      native.best(pool, logits, np.arange(3), 30).tolist(),
      [round(total, 9) for total in native.totals(pool, logits, *arguments)],
      native.forbid(pool, logits, np.arange(3), [mask] * 3)[1].tolist(), np.isinf(logits).sum())
"""


def _answers_with(isa):
    environment = os.environ | ({"TUREEN_CPU_ISA": isa} if isa else {})
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(" ", 1)


@pytest.mark.parametrize("isa", [name for name, runs, _ in native.isas() if runs])
def test_every_instruction_set_gives_the_same_answers(isa):
    found = _answers_with(isa)
    assert found[0] == isa
    assert found[1] == _answers_with(None)[1]
