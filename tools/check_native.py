"""Tests of the native kernels with checks of memory and undefined behaviour, and as other processors run them.

Two builds lie beside the usual one: build/sanitized has the checks, build/models runs the instructions that this
processor lacks by other means (cmake/isas.cmake). Tests and the processes they start find such a build through a
`sitecustomize` on PYTHONPATH. GCC only: with Clang the checks' libraries have other names.

`--if-changed` runs them only if the kernels changed since all ledgers passed. Other arguments go to pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from ledgers import is_to_run, without_choice
from side_by_side import Run, failures

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/kernels/cpu"
BITS = "tests/ledgers/kernels/test_isa_bits.py"
POOL = "tests/ledgers/kernels/test_pool_processes.py"
GUARDS = ("kernels", "tests/kernels/*", BITS, POOL, "cmake/*", "CMakeLists.txt", "tools/side_by_side.py")
INSTALL = f"{TESTS}/test_native_install.py"
"""It tests the usual build, as `make test` does."""
ONCE = (f"{TESTS}/test_native_closing.py", f"{TESTS}/test_native_history.py", f"{TESTS}/test_thread_tuner.py")
"""Tests of code that is the same under each instruction set: one run with the checks is enough."""
PRODUCTS = (f"{TESTS}/test_native_linear.py", f"{TESTS}/test_native_attention.py")
CHECKS = (
    "-O1 -g1 -w -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS"
)
SITECUSTOMIZE = """
import glob, importlib.util, sys

class OtherKernels:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "tureen.kernels.cpu._native":
            return importlib.util.spec_from_file_location(name, glob.glob({library!r})[0])

sys.meta_path.insert(0, OtherKernels)
"""


class Isa(NamedTuple):
    name: str
    runs_here: bool
    by_default: bool


def main() -> int:
    if not is_to_run(Path(__file__).resolve(), GUARDS, sys.argv):
        return 0
    usual: dict[str, str] = {}
    sets = [isa for isa in _isas(usual) if isa.runs_here]
    if not sets:
        sys.exit("check-native: the native kernels are not installed: make native")
    taken = next(isa.name for isa in sets if isa.by_default)  # `make test` runs it
    names = [isa.name for isa in sets]
    checked = _build("sanitized", CHECKS) | _checks()
    models = _build("models", "-O1 -Werror", "-DTUREEN_MODELS=ON")
    others = [isa for isa in _isas(models) if isa.name not in names or isa.name == "portable"]
    lacking = [isa.name for isa in others if isa.runs_here]
    unmodelled = [isa.name for isa in others if not isa.runs_here]
    if unmodelled:
        print(f"check-native: not checked, because their models need AVX-512: {', '.join(unmodelled)}")

    own = _own()
    runs = [_run(taken, "what all instruction sets share, checked", checked, ONCE)]
    runs += [_run(name, "checked", checked, own) for name in names]
    runs += [_run(name, "as it is", usual, own) for name in names if name != taken]
    runs += [_run(name, "modelled", models, PRODUCTS) for name in lacking]
    runs.append(_run(taken, "bits of all, modelled", models, (BITS,)))
    failed = failures("check-native", runs, without_choice(sys.argv[1:]))
    good = f"{', '.join(names)}; modelled {', '.join(lacking)}: all good"
    print(f"check-native: failed: {'; '.join(failed)}" if failed else f"check-native: {good}")
    return 1 if failed else 0


def _build(name: str, flags: str, *options: str) -> dict[str, str]:
    """Environment in which Python takes the build of that name."""
    folder = ROOT / "build" / name
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None", *options]
    configure += ["-DCMAKE_CXX_COMPILER=g++", f"-DCMAKE_CXX_FLAGS={flags}", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for command in (configure, ["cmake", "--build", str(folder)]):
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        if run.returncode:
            sys.exit(run.stdout.decode(errors="replace"))
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(library=str(folder / "_native*.so")), encoding="utf-8")
    return {"PYTHONPATH": str(site)}


def _checks() -> dict[str, str]:
    """What the checks' libraries need besides."""
    preload = [_library("libasan.so"), _library("libstdc++.so")]  # the latter, or no exception can be thrown
    return {
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python itself
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _library(name: str) -> str:
    return subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()


def _isas(environment: dict[str, str]) -> list[Isa]:
    """Of the build that Python takes with it, best first; none where there is no build."""
    code = "import json, tureen.kernels.cpu.native as n; m = n.load(); print(json.dumps(m.isas() if m else []))"
    everything = {key: value for key, value in os.environ.items() if key != "TUREEN_CPU_ISA"} | environment
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=everything, cwd=ROOT)
    return [Isa(*values) for values in json.loads(output)]


def _own() -> tuple[str, ...]:
    """Tests of one instruction set."""
    files = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / TESTS).glob("test_*.py"))
    return (*(file for file in files if file not in (INSTALL, *ONCE)), POOL)


def _run(instruction_set: str, how: str, environment: dict[str, str], tests: tuple[str, ...]) -> Run:
    options = ("--capture=sys",) if environment else ()  # what a check finds goes to the real stderr
    return Run(f"{instruction_set}, {how}", tests, environment | {"TUREEN_CPU_ISA": instruction_set}, options)


if __name__ == "__main__":
    sys.exit(main())
