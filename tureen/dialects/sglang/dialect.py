"""SGLang's API: `/generate`, `/encode`, `/v1/score`, `/v1/rerank`, `/classify`, `/vertex_generate`."""

from __future__ import annotations

from tureen.contract.params import ALIASES, SamplingParams
from tureen.dialects.sglang import classify, from_file, vertex
from tureen.dialects.sglang import generate as sglang
from tureen.dialects.sglang import score as score_routes
from tureen.dialects.sglang.body import PROMPT_FIELDS, TABLES, GenerateBody
from tureen.dialects.sglang.classify import ClassifyBody
from tureen.dialects.sglang.score import RerankBody, ScoreBody
from tureen.fields.shared import PerPrompt
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect, Entry, GenerateForm
from tureen.requests.state import ServerState
from tureen.sessions.tree import SessionParams

EMBEDDINGS = "See [embeddings](embeddings.md)."


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes of all modules of this API."""
    scores = score_routes.routes(state)
    without_version = [entry.at(entry.path.removeprefix("/v1")) for entry in scores]
    others = (classify.routes, vertex.routes, from_file.routes)
    return [*sglang.routes(state), *scores, *without_version, *(entry for routes in others for entry in routes(state))]


DIALECT = Dialect(
    order=10,
    routes=routes,
    compat=(
        CompatRoute(
            "SGLang",
            "/generate",
            (
                BodyPart(GenerateBody, TABLES["body"]),
                BodyPart(SamplingParams, TABLES["sampling_params"], "sampling_params", ALIASES),
                BodyPart(SessionParams, name="session_params"),
            ),
        ),
        CompatRoute("SGLang", "/encode", (BodyPart(sglang.EncodeBody, sglang.ENCODE_TABLE),)),
        CompatRoute("SGLang", "/v1/score", (BodyPart(ScoreBody, score_routes.TABLE),)),
        CompatRoute("SGLang", "/v1/rerank", (BodyPart(RerankBody, score_routes.TABLE),)),
    ),
    sections=(
        BodySection(
            "`POST /generate`, SGLang's dialect", "A list gives one value per prompt of a batch.", GenerateBody
        ),
        BodySection("`session_params`", "See [sessions](sessions.md).", SessionParams),
        BodySection("`POST /v1/rerank`", EMBEDDINGS, RerankBody),
        BodySection("`POST /v1/score`", EMBEDDINGS, ScoreBody),
        BodySection("`POST /classify`", EMBEDDINGS, ClassifyBody),
        BodySection("`POST /vertex_generate`", "Vertex AI's form of `/generate`.", vertex.VertexBody),
        BodySection("`POST /generate_from_file`", "Embeddings from a file.", from_file.GenerateFromFileBody),
    ),
    generate=GenerateForm(PROMPT_FIELDS, GenerateBody, sglang.respond),
    field_types={
        (GenerateBody, "sampling_params"): SamplingParams | PerPrompt[SamplingParams],
        (GenerateBody, "session_params"): SessionParams | PerPrompt[SessionParams],
    },
)
