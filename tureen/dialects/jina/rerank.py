"""Serves Jina's form of a route that orders documents by how well they answer a query.

Source: https://api.jina.ai/redoc and https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.errors import TureenError
from tureen.fields.body import convert, offered
from tureen.fields.rules import read_tables
from tureen.fields.shared import MAX_INPUTS
from tureen.http.dialect import Docs, Entry, ErrorShape, client_name, read_body_with, unless_gone
from tureen.http.errors import error_answer
from tureen.requests import batching
from tureen.requests.batching import Requester
from tureen.requests.model_field import adapter_of
from tureen.requests.reranking import WHOLE_CONTEXT, RerankOptions, rank
from tureen.requests.state import ServerState

TABLE = read_tables(Path(__file__).with_name("fields.toml"))["body"]
PATHS = ("/v1/reranking", "/reranking", "/jina/v1/rerank")

JINA_ERROR = ErrorShape(
    "JinaError", {"type": "object", "required": ["detail"], "properties": {"detail": {"type": "string"}}}
)

Text = Annotated[str, Meta(min_length=1)]


class JinaDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A document as an object."""

    text: Text


class JinaRerankBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/reranking`."""

    query: Annotated[str, Meta(description="The text that documents are compared with.", min_length=1)]
    documents: Annotated[
        list[Text | JinaDocument],
        Meta(description="Texts to order, or objects with `text`; at most 2048.", min_length=1, max_length=MAX_INPUTS),
    ]
    model: Annotated[str | None, Meta(description="The served model.")] = None
    top_n: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Return only this many, the best.")] = None
    return_documents: Annotated[bool, Meta(description="Return the documents' texts too.")] = True


def routes(state: ServerState) -> list[Entry]:
    """Return the routes of this API."""

    async def rerank(request: Request) -> ASGIApp:
        state.check_accepting()
        body = await read_body_with(request, _read)
        adapter_of(body.model, state)
        batching.check_count(len(body.documents), "documents")
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        names = [f"documents[{index}]" for index in range(len(texts))]
        asker = Requester(client_name(request))
        ranked = await unless_gone(
            request, rank(body.query, texts, names, RerankOptions(truncate=WHOLE_CONTEXT), asker, state)
        )
        num_tokens = sum(document.output.usage.prompt_tokens for document in ranked)
        answer = {
            "model": body.model or state.context.info.model_name,
            "object": "list",
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "results": [
                {"index": document.position, "relevance_score": document.score}
                | ({"document": {"text": texts[document.position]}} if body.return_documents else {})
                for document in ranked[: body.top_n]
            ],
        }
        return Response(msgspec.json.encode(answer), media_type="application/json")

    docs = Docs(
        "Jina",
        "Order documents by how well they answer a query.",
        bodies=(JinaRerankBody,),
        example={"query": "pets", "documents": ["A cat sleeps.", "Taxes rise."]},
        error=JINA_ERROR,
    )
    return [
        Entry(path, rerank, access="user", methods=["POST"], any_model=True, docs=docs, render_error=error_response)
        for path in PATHS
    ]


def error_response(error: TureenError) -> Response:
    """Return an error as an answer with Jina's body."""
    return error_answer(error, {"detail": error.message})


def _read(payload: dict[str, Any]) -> JinaRerankBody:
    return convert(offered(payload, JinaRerankBody.__struct_fields__, TABLE), JinaRerankBody, table=TABLE)
