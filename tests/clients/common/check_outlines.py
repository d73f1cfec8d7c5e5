"""Outlines constrains what a server generates."""

from __future__ import annotations

from typing import Literal

import openai
import outlines
import pytest
from pydantic import BaseModel

CLIENT = "Outlines"
PACKAGES = ("outlines",)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture
def served(url):
    return openai.OpenAI(base_url=f"{url}/v1", max_retries=0)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_choices_patterns_and_models(served, kind):
    model = getattr(outlines, f"from_{kind}")(served, "default")
    assert model("Is the sky blue?", Literal["yes", "no"], max_tokens=8, temperature=0) in ("yes", "no")
    assert model("A number:", outlines.types.Regex("[0-9]{3}"), max_tokens=8, temperature=0).isdigit()
    made = model("Describe Ada, who is 36.", Person, max_tokens=200, temperature=0)
    assert Person.model_validate_json(made)
    pieces = model.stream("Describe Ada, who is 36.", Person, max_tokens=200, temperature=0)
    assert Person.model_validate_json("".join(pieces))
