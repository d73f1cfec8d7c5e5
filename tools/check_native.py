"""Tests of the native kernels with checks of memory and undefined behaviour, and as lesser processors run them.

The checked build lies in build/sanitized. Tests and the processes they start find it through a `sitecustomize` on
PYTHONPATH. GCC only: with Clang the checks' libraries have other names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitized"
INSTRUCTION_SETS = ("avx512vnni", "avx512", "avxvnni", "avx2", "i8mm", "neon", "portable")
CHECKS = (
    "-O1 -g1 -w -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS"
)
SITECUSTOMIZE = """
import glob, importlib.util, sys

class CheckedKernels:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "tureen.kernels.cpu._native":
            return importlib.util.spec_from_file_location(name, glob.glob({library!r})[0])

sys.meta_path.insert(0, CheckedKernels)
"""


def main() -> int:
    _build()
    sets = [name for name in INSTRUCTION_SETS if _runs_here(name)]
    if not sets:
        sys.exit("check-native: the native kernels are not installed: make native")
    failures = [f"{name}, checked" for name in sets if not _passes(name, _checked())]
    failures += [name for name in sets[1:] if not _passes(name, {})]  # the first is what `make test` runs
    print(f"check-native: failed: {'; '.join(failures)}" if failures else f"check-native: {', '.join(sets)} all good")
    return 1 if failures else 0


def _build() -> None:
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None"]
    configure += ["-DCMAKE_CXX_COMPILER=g++", f"-DCMAKE_CXX_FLAGS={CHECKS}", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for command in (configure, ["cmake", "--build", str(BUILD)]):
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        if run.returncode:
            sys.exit(run.stdout.decode(errors="replace"))
    site = BUILD / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(library=str(BUILD / "_native*.so")), encoding="utf-8")


def _checked() -> dict[str, str]:
    """Environment in which Python takes the checked build."""
    preload = [_library("libasan.so"), _library("libstdc++.so")]  # the latter, or no exception can be thrown
    return {
        "PYTHONPATH": str(BUILD / "site"),
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python itself
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _library(name: str) -> str:
    return subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()


def _runs_here(instruction_set: str) -> bool:
    code = "from tureen.kernels.cpu import native; native.load() or exit(1)"
    environment = os.environ | {"TUREEN_CPU_ISA": instruction_set}
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=environment).returncode == 0


def _passes(instruction_set: str, environment: dict[str, str]) -> bool:
    print(f"check-native: {instruction_set}{', checked' if environment else ''}", flush=True)
    command = [sys.executable, "-m", "pytest", "tests/kernels/cpu", *sys.argv[1:]]
    command += ["--capture=sys"] if environment else []  # what a check finds goes to the real stderr
    environment = os.environ | environment | {"TUREEN_CPU_ISA": instruction_set}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
