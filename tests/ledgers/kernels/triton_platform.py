"""Skips the tests of a module that imports it where Triton has no wheels. Elsewhere a missing Triton is an error."""

import platform
import sys

import pytest

if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.skip("Triton has wheels for Linux on x86-64 only", allow_module_level=True)
