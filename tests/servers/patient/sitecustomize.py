"""Gives code of clients all the time that it needs, in a server that is started with this folder in PYTHONPATH: what
conftest.patient_sandbox does in a test's own process. The limits are of the clock on the wall, which goes on while a
busy machine lets the code wait."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

PATIENT_S = 120.0
LIMITS = {
    "tureen.sampling.processor_pool": ("LOAD_TIMEOUT_S", "CALL_TIMEOUT_S"),
    "tureen.sampling.processor_charges": ("LIMIT_S",),
}


class Patient:
    """Finds the modules with limits, and changes these when they are loaded."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name not in LIMITS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def load_patiently(module: ModuleType) -> None:
            load(module)
            for limit in LIMITS[name]:
                assert hasattr(module, limit)
                setattr(module, limit, PATIENT_S)

        spec.loader.exec_module = load_patiently
        return spec


sys.meta_path.insert(0, Patient())
