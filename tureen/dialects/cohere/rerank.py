"""Serves Cohere's routes that order documents by how well they answer a query.

Source: https://docs.cohere.com/reference/rerank and https://docs.cohere.com/v1/reference/rerank
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.params import JsonObject
from tureen.errors import InvalidRequest, TureenError
from tureen.fields.body import convert, offered
from tureen.fields.rules import read_tables
from tureen.fields.shared import MAX_INPUTS
from tureen.http.dialect import Docs, Entry, ErrorShape, client_name, read_body_with, unless_gone
from tureen.http.errors import error_answer
from tureen.requests import batching
from tureen.requests.batching import Requester
from tureen.requests.model_field import adapter_of
from tureen.requests.reranking import WHOLE_CONTEXT, RerankOptions, ScoredDocument, rank
from tureen.requests.state import ServerState

TABLES = read_tables(Path(__file__).with_name("fields.toml"))
MAX_TOKENS_PER_DOC = 4096
MAX_FIELDS = 64
DOCUMENTS_PER_UNIT = 100
"""Documents that Cohere bills as one search unit."""

COHERE_ERROR = ErrorShape(
    "CohereError", {"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}}}
)

Query = Annotated[str, Meta(description="The text that documents are compared with.", min_length=1)]
TopN = Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Return only this many, the best.")]
B = TypeVar("B", "CohereRerankBody", "CohereV1RerankBody")

ModelName = Annotated[str | None, Meta(description="The served model.")]


class CohereRerankBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v2/rerank`."""

    query: Query
    documents: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(description="Texts to order; at most 2048.", min_length=1, max_length=MAX_INPUTS),
    ]
    model: ModelName = None
    top_n: TopN = None
    max_tokens_per_doc: Annotated[
        int, Meta(ge=1, description="Keep only this many tokens of each document, the first ones.")
    ] = MAX_TOKENS_PER_DOC
    priority: Annotated[int, Meta(ge=0, le=999, description="0 runs first; needs --enable-priority-scheduling.")] = 0


class CohereV1RerankBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /cohere/v1/rerank`."""

    query: Query
    documents: Annotated[
        list[str | JsonObject],
        Meta(
            description="Texts, or objects with `text` or the `rank_fields`; at most 2048.",
            min_length=1,
            max_length=MAX_INPUTS,
        ),
    ]
    model: ModelName = None
    top_n: TopN = None
    rank_fields: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=MAX_FIELDS)] | None,
        Meta(description="The fields of documents that are compared. Default: `text`."),
    ] = None
    return_documents: Annotated[bool, Meta(description="Return the documents too.")] = False


def routes(state: ServerState) -> list[Entry]:
    """Return the routes of this API."""

    async def rerank_v2(request: Request) -> ASGIApp:
        state.check_accepting()
        body = await read_body_with(request, lambda payload: _read(payload, CohereRerankBody, "v2"))
        adapter_of(body.model, state)
        how = RerankOptions(None, WHOLE_CONTEXT, -body.priority, document_tokens=body.max_tokens_per_doc)
        names, asker = _names(body.documents), _asker(request)
        ranked = await unless_gone(request, rank(body.query, body.documents, names, how, asker, state))
        return _response(ranked[: body.top_n], [{} for _ in names], "2")

    async def rerank_v1(request: Request) -> ASGIApp:
        state.check_accepting()
        body = await read_body_with(request, lambda payload: _read(payload, CohereV1RerankBody, "v1"))
        adapter_of(body.model, state)
        documents = [text_of(index, document, body.rank_fields) for index, document in enumerate(body.documents)]
        how = RerankOptions(truncate=WHOLE_CONTEXT)
        ranked = await unless_gone(request, rank(body.query, documents, _names(documents), how, _asker(request), state))
        shown = [
            {"document": {"text": sent} if isinstance(sent, str) else sent} if body.return_documents else {}
            for sent in body.documents
        ]
        return _response(ranked[: body.top_n], shown, "1")

    return [
        _entry("/v2/rerank", rerank_v2, CohereRerankBody),
        _entry("/cohere/v2/rerank", rerank_v2, CohereRerankBody),
        _entry("/cohere/v1/rerank", rerank_v1, CohereV1RerankBody),
    ]


def _entry(path: str, endpoint: Any, body: type[msgspec.Struct]) -> Entry:
    docs = Docs(
        "Cohere",
        "Order documents by how well they answer a query.",
        bodies=(body,),
        example={"model": "default", "query": "pets", "documents": ["A cat sleeps.", "Taxes rise."]},
        error=COHERE_ERROR,
    )
    return Entry(
        path, endpoint, access="user", methods=["POST"], any_model=True, docs=docs, render_error=error_response
    )


def error_response(error: TureenError) -> Response:
    """Return an error as an answer with Cohere's body."""
    return error_answer(error, {"message": error.message})


def _read(payload: dict[str, Any], kind: type[B], version: str) -> B:
    table = TABLES[version]
    return convert(offered(payload, kind.__struct_fields__, table), kind, table=table)


def _asker(request: Request) -> Requester:
    return Requester(client_name(request))


def _names(documents: Sequence[str]) -> list[str]:
    batching.check_count(len(documents), "documents")
    return [f"documents[{index}]" for index in range(len(documents))]


def text_of(index: int, document: str | JsonObject, rank_fields: Sequence[str] | None) -> str:
    """Return the text of a document. Raises InvalidRequest for an object without the fields that are compared, and for
    an empty text."""
    if isinstance(document, str):
        text = document
    elif rank_fields is None:
        text = document.get("text", "")
    else:
        sent = {name: document[name] for name in rank_fields if document.get(name) not in (None, "")}
        text = "\n".join(f"{name}: {value}" for name, value in sent.items())
    if isinstance(text, str) and text:
        return text
    field = f"documents[{index}]"
    has_text = "one of the rank_fields" if rank_fields else "text"
    raise InvalidRequest(f"{field} has no text; send a string, or an object with {has_text}", field=field)


def _response(ranked: Sequence[ScoredDocument], shown: Sequence[JsonObject], version: str) -> Response:
    """Return the answer. `shown`: what it says of each document of the body."""
    units = -(-len(shown) // DOCUMENTS_PER_UNIT)
    answer = {
        "id": str(uuid.uuid4()),
        "results": [
            {"index": document.position, "relevance_score": document.score} | shown[document.position]
            for document in ranked
        ],
        "meta": {
            "api_version": {"version": version} | ({"is_experimental": False} if version == "2" else {}),
            "billed_units": {"search_units": units},
        },
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")
