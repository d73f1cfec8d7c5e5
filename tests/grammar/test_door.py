"""The names that the library gives to its callers, and the README that lists them."""

from pathlib import Path

import pytest

import tureen.grammar

README = Path(tureen.grammar.__file__).with_name("README.md")


def test_every_name_of_the_door_is_in_the_readme_or_is_a_type():
    text = README.read_text(encoding="utf-8")
    types = {"Encode", "Mask"}
    assert {name for name in tureen.grammar.__all__ if f"`{name}" not in text} <= types
    assert all(getattr(tureen.grammar, name) is not None for name in tureen.grammar.__all__)


def test_the_door_has_no_other_names():
    with pytest.raises(AttributeError, match="has no attribute 'compile_schema'"):
        tureen.grammar.compile_schema  # noqa: B018 - asked for, not used
