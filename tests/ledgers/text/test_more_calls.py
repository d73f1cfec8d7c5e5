"""Calls of tools that random models write: more outputs of each format than in tests/text."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "text"))
import test_tool_constraints
from test_tool_constraints import (
    test_a_required_call_comes_alone_and_its_arguments_are_valid,  # noqa: F401 - runs here with more seeds
    test_a_strict_tool_gets_valid_arguments_wherever_the_model_calls_it,  # noqa: F401
    test_an_output_is_valid_calls_or_else_the_object,  # noqa: F401
)

GUARDS = ("text", "grammar")


@pytest.fixture(autouse=True)
def all_seeds(monkeypatch):
    monkeypatch.setattr(test_tool_constraints, "LEAST_SEEDS", 1000)
