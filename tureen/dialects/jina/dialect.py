"""Jina's `/jina/v1/rerank`, and llama.cpp's `/reranking` of the same form."""

from __future__ import annotations

from tureen.dialects.jina import rerank
from tureen.dialects.jina.rerank import TABLE, JinaRerankBody
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect

DIALECT = Dialect(
    order=80,
    routes=rerank.routes,
    compat=(CompatRoute("Jina", "/v1/reranking", (BodyPart(JinaRerankBody, TABLE),)),),
    sections=(
        BodySection("`POST /v1/reranking`", "See [embeddings](embeddings.md#other-forms-of-rerank).", JinaRerankBody),
    ),
)
