"""Answers of the real model that OpenAI's client makes pydantic models of."""

from __future__ import annotations

import pytest
from openai_judge import make_client
from pydantic import BaseModel
from pydantic_models import MODELS, NOT_TOLD

GUARDS = ("grammar", "grammar_service", "dialects")

pytestmark = pytest.mark.model

ASKED = [
    name
    for name, model in MODELS.items()
    if isinstance(model, type) and issubclass(model, BaseModel) and name not in NOT_TOLD
]
SLOW = ("WithUrl",)
"""The models that take a busy machine longer to compile than a constraint may take."""
SAMPLE = [name for name in ASKED[::4] if name not in SLOW]
"""Every fourth: an answer takes a second or two."""


@pytest.mark.parametrize("name", SAMPLE)
def test_an_answer_is_one_of_the_model(server, name):
    with make_client(server.url) as client:
        answer = client.chat.completions.parse(
            model="default",
            messages=[{"role": "user", "content": f"Make up a short {name}, as JSON."}],
            response_format=MODELS[name],
            max_tokens=200,
            temperature=0,
        )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, MODELS[name])
