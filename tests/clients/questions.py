"""What every client is asked: one right answer, a tool call, an object, and a text long enough to be left half-way."""

from __future__ import annotations

from pydantic import BaseModel

CAPITAL = "What is the capital city of France? Answer in one sentence."
WEATHER = "What is the weather in Paris?"
DESCRIBE = "Describe Ada, who is 36, as an object."
LONG = "Tell a very long story about the sea."


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Returns the weather in a city.

    Args:
        city: its name.
    """
    return f"It is sunny in {city}."
