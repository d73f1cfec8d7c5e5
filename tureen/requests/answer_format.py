"""Turns the constraint of a chat's answer into a format of structural tags. Together with the format of tool calls it
makes a choice: the output is a call or the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tureen.contract.params import CONSTRAINTS
from tureen.errors import InvalidRequest
from tureen.grammar.base import GrammarSpec
from tureen.requests.planning import Names

ANY_JSON = "$$ANY$$"
"""SGLang's value for a schema that allows every JSON value."""


class AnswerFormat(NamedTuple):
    """The constraint of an answer in a chat that also allows calls."""

    parameter: str  # of SamplingParams
    layout: dict[str, Any]  # as a format of structural tags
    spec: GrammarSpec | None  # for the final check of an answer that is not a call; None = no check
    place: str  # path of the client's text in the layout, which errors about the grammar name

    def not_strict(self) -> dict[str, Any]:
        """Returns the layout. It lists the unenforceable keywords of a schema even if other parts are strict."""
        return self.layout | {"strict": False} if self.place == self.parameter else self.layout


def answer_format(sampling: Mapping[str, Any], names: Names, *, unicode_classes: bool) -> AnswerFormat | None:
    """Returns the constraint among the sampling parameters of a body. Returns None without a constraint, and for a
    structural tag, which itself defines where calls may occur.

    Raises InvalidRequest for a constraint that cannot be combined with calls.
    """
    parameter = next((name for name in CONSTRAINTS if sampling.get(name) is not None), None)
    if parameter is None or parameter == "structural_tag":
        return None
    value, field = sampling[parameter], names.path(parameter)
    if parameter == "dtype":
        raise InvalidRequest(f"{field} cannot go with tools; send regex, or tool_choice none", field=field)
    if parameter == "choice":
        pattern = "|".join(re.escape(text) for text in value)
        spec = GrammarSpec("choice", msgspec.json.encode(value).decode())
        return AnswerFormat(parameter, {"type": "regex", "pattern": pattern}, spec, "pattern")
    if parameter == "regex":
        spec = GrammarSpec("regex", value, unicode_classes=unicode_classes)
        return AnswerFormat(parameter, {"type": "regex", "pattern": value}, spec, "pattern")
    if parameter == "ebnf":
        return AnswerFormat(parameter, {"type": "grammar", "grammar": value}, None, "grammar")
    # a JSON schema: the parameter, the format and its key for the schema have the same name
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    spec = GrammarSpec(parameter, text)  # type: ignore[arg-type]
    return AnswerFormat(parameter, {"type": parameter, parameter: _schema(value, field)}, spec, parameter)


def _schema(value: Any, field: str) -> Any:
    """Decodes a schema, which may be JSON text. Raises InvalidRequest."""
    if not isinstance(value, str):
        return value
    if value == ANY_JSON:
        return True
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {str(error)[:200]}", field=field) from None
