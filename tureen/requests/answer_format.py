"""Turns the constraint of a chat's answer into a format of structural tags, which can stand beside that of tool
calls: the output is one or the other."""

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
"""Stands for a schema that allows every JSON value, as SGLang has it."""


class AnswerFormat(NamedTuple):
    """The constraint of an answer, beside which there may be calls."""

    parameter: str  # of SamplingParams
    layout: dict[str, Any]  # as a format of structural tags
    spec: GrammarSpec | None  # to judge an answer by that is no call; None = nobody judges it
    place: str  # of the client's text within the layout, as errors about the grammar name it

    def not_strict(self) -> dict[str, Any]:
        """Returns the layout, which lists what of a schema cannot be enforced where other parts are strict."""
        return self.layout | {"strict": False} if self.place == self.parameter else self.layout


def answer_format(sampling: Mapping[str, Any], names: Names, *, unicode_classes: bool) -> AnswerFormat | None:
    """Returns the constraint among the sampling parameters that a body sets; None where there is none, and for a
    structural tag, which says itself where calls may stand.

    Raises InvalidRequest for one that calls cannot stand beside.
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
    # a JSON schema: parameter, format, and the key of the schema in it have one name
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    spec = GrammarSpec(parameter, text)  # type: ignore[arg-type]
    return AnswerFormat(parameter, {"type": parameter, parameter: _schema(value, field)}, spec, parameter)


def _schema(value: Any, field: str) -> Any:
    """Decodes a schema, which may come as JSON text. Raises InvalidRequest."""
    if not isinstance(value, str):
        return value
    if value == ANY_JSON:
        return True
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {str(error)[:200]}", field=field) from None
