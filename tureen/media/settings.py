"""Reads values of a model's JSON files, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tureen.errors import StartupError, echo

LARGEST: Final = (1 << 31) - 1
"""The largest accepted integer."""
MOST: Final = {"depth": 4096, "num_hidden_layers": 4096}
"""The largest accepted numbers of layers. Memory grows with these before any weight is compared."""


class Settings:
    """An object of a JSON file. A key that is missing or null takes the default, where there is one.

    Each method raises StartupError naming the file and the key.
    """

    def __init__(self, file: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise StartupError(f"{file}: must be an object, got {echo(values)}")
        self.file = file
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value under the key as it is; the default where it is missing or null."""
        value = self._values.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Says whether the key is there, null or not."""
        return key in self._values

    def part(self, key: str) -> Settings:
        """Returns the object under the key; an empty one if there is none."""
        return Settings(f"{self.file}: {key}", self.get(key, {}))

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns an integer of at least 1."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self.fault(key, "is missing" if value is None else f"must be a positive integer, got {echo(value)}")
        if value > MOST.get(key, LARGEST):
            raise self.fault(key, f"must be at most {MOST.get(key, LARGEST)}, got {echo(value)}")
        return value

    def token_id(self, key: str, default: int) -> int | None:
        """Returns a token id; None for null: the tokenizer has no such token."""
        return None if self.has(key) and self.get(key) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number greater than 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.fault(key, "is missing" if value is None else f"must be a positive number, got {echo(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, f"must be true or false, got {echo(value)}")
        return value

    def word(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Returns a string, which must be one of `allowed`."""
        value = self.get(key, default)
        if value not in allowed:
            raise self.fault(key, f"{echo(value)} is not supported; known: {', '.join(allowed)}")
        return str(value)

    def fault(self, key: str, what: str) -> StartupError:
        """Returns the error for a key; `what` says what is wrong with its value."""
        return StartupError(f"{self.file}: {key}: {what}", field=key)
