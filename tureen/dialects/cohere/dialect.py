"""Cohere's `/v2/rerank`, and `/cohere/v1/rerank`: the path `/v1/rerank` is SGLang's."""

from __future__ import annotations

from tureen.dialects.cohere import rerank
from tureen.dialects.cohere.rerank import TABLES, CohereRerankBody, CohereV1RerankBody
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect

PAGE = "See [embeddings](embeddings.md#other-forms-of-rerank)."

DIALECT = Dialect(
    order=70,
    routes=rerank.routes,
    compat=(
        CompatRoute("Cohere", "/v2/rerank", (BodyPart(CohereRerankBody, TABLES["v2"]),)),
        CompatRoute("Cohere", "/cohere/v1/rerank", (BodyPart(CohereV1RerankBody, TABLES["v1"]),)),
    ),
    sections=(
        BodySection("`POST /v2/rerank`", PAGE, CohereRerankBody),
        BodySection("`POST /cohere/v1/rerank`", PAGE, CohereV1RerankBody),
    ),
)
