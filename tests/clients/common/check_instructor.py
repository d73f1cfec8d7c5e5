"""Instructor makes pydantic models out of answers, in each of its ways."""

from __future__ import annotations

import instructor
import openai
import pytest
from pydantic import BaseModel

CLIENT = "Instructor"
PACKAGES = ("instructor",)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT])
def test_an_answer_becomes_a_model(url, mode):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", max_retries=0), mode=mode)
    person = client.chat.completions.create(
        model="default",
        response_model=Person,
        messages=[{"role": "user", "content": "Describe Ada, who is 36."}],
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    assert isinstance(person, Person)
