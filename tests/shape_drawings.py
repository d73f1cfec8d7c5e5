"""The drawings of tools/shapes.py, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

UNSEEN = 1_000_000
"""Seeds from here on are never learned from; see tools/train_shapes_projector.py."""


def load() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "tools" / "shapes.py"
    spec = importlib.util.spec_from_file_location("shapes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shapes"] = module
    spec.loader.exec_module(module)
    return module
