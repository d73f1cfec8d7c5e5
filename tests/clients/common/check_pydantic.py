"""Models as people write them with pydantic, through OpenAI's `parse` and through instructor."""

from __future__ import annotations

import instructor
import openai
import pytest
from pydantic_models import MODELS

CLIENT = "OpenAI's SDK and Instructor with Pydantic models"
PACKAGES = ("openai", "instructor", "pydantic")

NAMES = (
    "WithOptional",
    "WithDiscriminated",
    "WithSet",
    "WithTuple",
    "WithAddresses",
    "WithUUID",
    "Node",
    "WithMapByEnum",
)
MODES = (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS)


def asked(name: str) -> dict:
    say = [{"role": "user", "content": f"Make up a short {name}."}]
    return {"model": "default", "messages": say, "temperature": 0, "max_tokens": 200}


@pytest.mark.parametrize("name", NAMES)
def test_parse_makes_the_model(url, name):
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    answer = client.chat.completions.parse(response_format=MODELS[name], **asked(name))
    assert isinstance(answer.choices[0].message.parsed, MODELS[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_instructor_makes_the_model_at_the_first_try(url, name, mode):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", max_retries=0), mode=mode)
    answer = client.chat.completions.create(response_model=MODELS[name], max_retries=0, **asked(name))
    assert isinstance(answer, MODELS[name])
