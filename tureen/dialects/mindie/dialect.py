"""MindIE's and vLLM's dialect of `/generate`; MindIE's `/infer` and `/v2/…`."""

from __future__ import annotations

from tureen.dialects.mindie import generate as mindie
from tureen.dialects.mindie import infer, triton
from tureen.dialects.mindie.generate import TABLE, MindieBody
from tureen.dialects.mindie.infer import MindieInferBody
from tureen.dialects.mindie.parameters import TABLES, MindieParameters
from tureen.dialects.mindie.triton import TritonGenerateBody, TritonInferBody
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect, Entry, GenerateForm
from tureen.requests.state import ServerState

PAGE = "See [MindIE and vLLM](mindie.md#infer-and-v2)."
PARAMETERS = BodyPart(MindieParameters, TABLES["parameters"], "parameters")


def routes(state: ServerState) -> list[Entry]:
    """Return the routes with paths of their own."""
    return [*infer.routes(state), *triton.routes(state)]


DIALECT = Dialect(
    order=20,
    routes=routes,
    compat=(
        CompatRoute("MindIE and vLLM's demo server", "/generate", (BodyPart(MindieBody, TABLE),)),
        CompatRoute("MindIE", "/infer", (BodyPart(MindieInferBody, TABLES["infer"]), PARAMETERS)),
        CompatRoute(
            "MindIE", "/v2/models/default/generate", (BodyPart(TritonGenerateBody, TABLES["triton"]), PARAMETERS)
        ),
        CompatRoute("MindIE", "/v2/models/default/infer", (BodyPart(TritonInferBody, TABLES["triton"]), PARAMETERS)),
    ),
    sections=(
        BodySection(
            "`POST /generate`, the dialect of MindIE and vLLM", "See [MindIE and vLLM](mindie.md).", MindieBody
        ),
        BodySection("`POST /infer`", PAGE, MindieInferBody),
        BodySection("`POST /v2/models/NAME/generate`", PAGE, TritonGenerateBody),
        BodySection("`POST /v2/models/NAME/infer`", PAGE, TritonInferBody),
        BodySection("`parameters` of `/infer` and `/v2`", PAGE, MindieParameters),
    ),
    generate=GenerateForm(("prompt",), MindieBody, mindie.respond, refuse=mindie.as_mindie),
)
