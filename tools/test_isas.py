"""Tests of what depends on instruction sets, under each that this machine has: ours, oneDNN's and torch's.

What a processor lacks cannot be had by a setting; what it has can be withheld.

`--if-changed` runs them only if what they depend on changed since all ledgers passed. Other arguments go to pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from ledgers import is_to_run, without_choice
from side_by_side import Run, failures

from tureen.kernels.cpu import native

ONEDNN = {
    "AVX2": "avx2",
    "AVX512_CORE": "avx512bw",
    "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_bf16",
}
"""Its names, and the flag in /proc/cpuinfo of a processor that has the set."""
ATEN = {"default": "", "avx2": "avx2", "avx512": "avx512bw"}
TORCH_TESTS: tuple[str, ...] = (
    "tests/kernels/test_linear.py",
    "tests/kernels/test_rows.py",
    "tests/layers",
    "tests/attention",
    "tests/ledgers/runner/test_every_combination.py::test_logprobs_of_torch_do_not_depend_on_company_chunks_or_pages",
    "tests/vision/test_llava_models.py",
)
NATIVE_TESTS: tuple[str, ...] = (
    "tests/runner/test_batch_invariance.py",
    "tests/models/test_smollm2.py",
    "tests/servers/test_server.py::test_the_model_answers_a_question_again_from_the_cache",
)
PACKAGES = ("attention", "kernels", "layers", "models", "runner", "vision")
GUARDS = (*PACKAGES, "tools/side_by_side.py", *(f"{test.partition('::')[0]}*" for test in TORCH_TESTS + NATIVE_TESTS))


def main() -> int:
    if not is_to_run(Path(__file__).resolve(), GUARDS, sys.argv):
        return 0
    levels = [_level("TUREEN_CPU_ISA", name, NATIVE_TESTS) for name in native_sets()]
    levels += [_level("ONEDNN_MAX_CPU_ISA", name, TORCH_TESTS) for name in _present(ONEDNN)]
    levels += [_level("ATEN_CPU_CAPABILITY", name, TORCH_TESTS) for name in _present(ATEN)]
    failed = failures("test-isas", levels, without_choice(sys.argv[1:]))
    print(f"test-isas: failed: {'; '.join(failed)}" if failed else f"test-isas: {len(levels)} levels all good")
    return 1 if failed else 0


def native_sets() -> list[str]:
    """Our kernels that run here, but for those in use, which `make test` runs; none where they are not built."""
    kernels = native.load()
    return [name for name, runs, _ in kernels.isas() if runs and name != kernels.isa()] if kernels else []


def _present(levels: dict[str, str]) -> list[str]:
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        flags = set()
    return [name for name, flag in levels.items() if not flag or flag in flags]


def _level(variable: str, name: str, tests: tuple[str, ...]) -> Run:
    return Run(f"{variable}={name}", tests, {variable: name})


if __name__ == "__main__":
    sys.exit(main())
