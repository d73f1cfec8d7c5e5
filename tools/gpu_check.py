"""Check the engine on a CUDA device, and print predictions beside the figures: `python3 tools/gpu_check.py`.

It needs no network, no make and no installation: Python 3.11 or 3.12, torch 2.11 to 2.13 with its Triton, and what
tureen imports. Missing packages can lie as wheels in `build/wheels` (`pip download --no-deps -d build/wheels msgspec
dill`). Without a CUDA device it says so and ends.

    --only kernels,decode    some sections; `--list` names them
    --shape small            a small model, for a quick look
    --device cpu             try this script without a GPU

A section that fails is reported and the next one runs. The table is printed last, and written as JSON to
bench/results/gpu/.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "wheels"


def main() -> int:
    with tempfile.TemporaryDirectory() as unpacked:
        for wheel in sorted(WHEELS.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(unpacked)
        sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
        sys.path.append(unpacked)
        status: int = importlib.import_module("gpu_sections").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
