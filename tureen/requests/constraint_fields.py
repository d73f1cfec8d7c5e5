"""The parameters that constrain the output become the one grammar of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tureen.config import Config
from tureen.contract.params import CONSTRAINTS, MAX_STOPS, SamplingParams
from tureen.errors import InvalidRequest
from tureen.grammar.base import GrammarSpec

DTYPES = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "bool": "(True|False)",
    "str": r'"[\w\d\s]*"',
}
DTYPE_STOPS = {"int": (" ", "\n"), "float": (" ", "\n")}
"""What SGLang's frontend language sends in place of `dtype`."""


class GrammarConstraint(NamedTuple):
    """What an output must match, and the parameters with the stops that belong to it."""

    params: SamplingParams
    grammar: GrammarSpec | None = None
    field: str = ""  # what the client called it


def constrained(params: SamplingParams, path: Callable[[str], str], config: Config) -> GrammarConstraint:
    """The constraint among a request's parameters. Raises InvalidRequest."""
    name = next((name for name in CONSTRAINTS if getattr(params, name) is not None), None)
    if name is None:
        return GrammarConstraint(params)
    field = path(name)
    if config.grammar_backend == "none":
        raise InvalidRequest(f"{field}: the server runs with --grammar-backend none; leave it out", field=field)
    spec = _spec(name, params)
    if params.dtype is not None:
        stops = params.stop + DTYPE_STOPS.get(params.dtype, ())
        if len(stops) > MAX_STOPS:
            more = len(stops) - len(params.stop)
            raise InvalidRequest(
                f"{path('stop')} takes at most {MAX_STOPS - more} entries beside dtype {params.dtype}, which has "
                f"{more} of its own, got {len(params.stop)}",
                field=path("stop"),
            )
        params = msgspec.structs.replace(params, stop=stops)
    return GrammarConstraint(params, spec, field)


def _spec(name: str, params: SamplingParams) -> GrammarSpec:
    value = getattr(params, name)
    if name == "dtype":
        return GrammarSpec("regex", DTYPES[value], params.grammar_after)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return GrammarSpec(name, text, params.grammar_after)  # type: ignore[arg-type]
