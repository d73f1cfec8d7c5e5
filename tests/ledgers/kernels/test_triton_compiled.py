"""Gate (b): the table of Triton kernels, compiled for sm_80 and sm_90 without a GPU, is code that can be fast."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton_platform  # noqa: F401  skips this file elsewhere

GUARDS = ("tureen/kernels/triton/*", "tests/ledgers/kernels/compile_kernels.py")

FOLDER = Path(__file__).parent
PRODUCTS = {80: "HMMA.", 90: "HGMMA."}
"""Instructions of the tensor cores of each kind of GPU."""
PRODUCERS = ("linear", "decode", "prefill")
MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024}
MAY_SPILL = {(80, "prefill gemma-2-9b"): 64}
"""Most bytes of stack of what does not fit into 255 registers: two sums of 64 queries with heads of 256."""


@pytest.fixture(scope="module", params=PRODUCTS)
def compiled(request, tmp_path_factory):
    """Returns the kind of GPU, and what the compiler did for each name in the table."""
    cache = str(tmp_path_factory.mktemp("cache"))
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(FOLDER / "compile_kernels.py"), str(request.param)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return request.param, json.loads(run.stdout)


def test_no_kernel_spills_and_shared_memory_suffices(compiled):
    capability, kernels = compiled
    stacks = {name: facts["stack"] + facts["local"] for name, facts in kernels.items()}
    assert {name: size for name, size in stacks.items() if size > MAY_SPILL.get((capability, name), 0)} == {}
    assert {name for name, facts in kernels.items() if facts["shared"] > MOST_SHARED[capability]} == set()


def test_loads_are_wide(compiled):
    _, kernels = compiled
    narrow = [
        name
        for name, facts in kernels.items()
        if not any(code.startswith("LDG") and code.endswith(("128", "64")) for code in facts["instructions"])
    ]
    assert narrow == []


def test_products_use_tensor_cores_and_pipelined_copies(compiled):
    capability, kernels = compiled
    products = {name: facts for name, facts in kernels.items() if name.split()[0] in PRODUCERS}
    assert len(products) > 15
    for name, facts in products.items():
        codes = " ".join(facts["instructions"])
        assert f"{PRODUCTS[capability]}" in codes, name
        assert "LDGSTS.E.BYPASS.128" in codes, name


def test_a_product_has_its_tokens_on_the_narrow_side_of_each_instruction(compiled):
    """So the number of tokens does not choose another order of sums."""
    capability, kernels = compiled
    for name, facts in kernels.items():
        if name.startswith("linear "):
            codes = [code for code in facts["instructions"] if code.startswith(PRODUCTS[capability])]
            form = r"HMMA\.16816\.F32\.BF16" if capability == 80 else r"HGMMA\.64x\d+x16\.F32\.BF16"
            assert [bool(re.fullmatch(form, code)) for code in codes] == [True], (name, codes)


def test_a_prefill_multiplies_with_the_instructions_of_a_decode_step(compiled):
    """So a query has the same sums in both."""
    capability, kernels = compiled
    codes = {
        name: [code for code in facts["instructions"] if code.startswith(PRODUCTS[capability])]
        for name, facts in kernels.items()
    }
    models = [name.removeprefix("decode ") for name in kernels if name.startswith("decode ")]
    assert len(models) > 3
    assert [model for model in models if codes[f"decode {model}"] != codes[f"prefill {model}"]] == []
