"""DSPy programs, with its chat and JSON adapters."""

from __future__ import annotations

import dspy
import pytest
from questions import CAPITAL, Person

CLIENT = "DSPy"
PACKAGES = ("dspy", "litellm")
KNOWN_NAME = "openai/gpt-4o-mini"  # of names that it does not know, it believes that they take no schema


@pytest.fixture
def model(url):
    return dspy.LM(
        KNOWN_NAME,
        api_base=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=200,
        cache=False,
        num_retries=0,
    )


def test_a_plain_question(model):
    assert "Paris" in str(model(CAPITAL)[0])


@pytest.mark.parametrize("adapter", [dspy.JSONAdapter])
def test_a_program_gets_its_typed_output(model, adapter):
    with dspy.context(lm=model, adapter=adapter()):
        answer = dspy.Predict("description: str -> age: int")(description="Ada is 36 years old.")
    assert isinstance(answer.age, int)


def test_a_program_gets_a_pydantic_model(model):
    class Describe(dspy.Signature):
        """Describe the person."""

        text: str = dspy.InputField()
        person: Person = dspy.OutputField()

    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Describe)(text="Ada is 36.").person, Person)


def test_an_error_names_the_field(url):
    model = dspy.LM(KNOWN_NAME, api_base=f"{url}/v1", api_key="none", temperature=-1, cache=False, num_retries=0)
    with pytest.raises(Exception, match="temperature"):
        model(CAPITAL)
