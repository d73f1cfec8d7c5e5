"""llama.cpp's API: `/completion`, `/infill`, `/props`, `/slots`, and the bodies of `/tokenize` that have `content`."""

from __future__ import annotations

from tureen.dialects.llamacpp import completion, facts
from tureen.dialects.llamacpp.body import TABLES, LlamaCompletionBody, LlamaInfillBody
from tureen.dialects.llamacpp.facts import LlamaTokenizeBody
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect, Entry
from tureen.requests.state import ServerState

PAGE = "See [llama.cpp's API](llamacpp.md)."


def routes(state: ServerState) -> list[Entry]:
    """Return the routes of all modules of this API."""
    return [*completion.routes(state), *facts.routes(state)]


DIALECT = Dialect(
    order=65,
    routes=routes,
    compat=(
        CompatRoute("llama.cpp", "/completion", (BodyPart(LlamaCompletionBody, TABLES["completion"]),)),
        CompatRoute("llama.cpp", "/infill", (BodyPart(LlamaInfillBody, TABLES["completion"]),)),
        CompatRoute("llama.cpp", "/tokenize", (BodyPart(LlamaTokenizeBody, TABLES["tokenize"]),)),
    ),
    sections=(
        BodySection("`POST /completion`", PAGE, LlamaCompletionBody),
        BodySection("`POST /infill`", PAGE, LlamaInfillBody),
        BodySection("`POST /tokenize` with `content`", PAGE, LlamaTokenizeBody),
    ),
)
