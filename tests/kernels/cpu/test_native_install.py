"""Native kernels that are not there, or that cannot be loaded."""

import importlib
import sys

import pytest

from tureen.kernels.cpu import native

NAME = "tureen.kernels.cpu._native"


def test_an_installation_without_native_kernels_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, None)
    assert native.load() is None
    with pytest.raises(RuntimeError, match="apt-get install g\\+\\+ python3-dev"):
        native.require()


def test_native_kernels_that_the_system_cannot_load_are_an_error(monkeypatch):
    def fails(name):
        raise ImportError("version `GLIBCXX_3.4.99' not found")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ImportError, match="GLIBCXX"):
        native.load()


def test_a_module_that_the_native_kernels_miss_is_an_error(monkeypatch):
    def fails(name):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        native.load()
