"""Drawings do not depend on the process that makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import shape_drawings

shapes = shape_drawings.load()
DIGEST = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import shapes
print(hashlib.sha256(b"".join(shapes.draw(seed).picture.tobytes() for seed in range(8))).hexdigest())
"""


def test_a_seed_gives_the_same_drawing_in_every_process():
    def digest(hash_seed):
        run = [sys.executable, "-c", DIGEST, str(Path(shapes.__file__).parent)]
        return subprocess.run(
            run, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, check=True
        ).stdout

    assert digest("1") == digest("2")
