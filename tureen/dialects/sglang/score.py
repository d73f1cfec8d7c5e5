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
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.types import LEAST_LOGPROB, LogprobSpec
from tureen.errors import InvalidRequest, echo
from tureen.fields.body import convert, offered, read_json
from tureen.fields.rules import read_tables
from tureen.fields.shared import MAX_INPUTS, MAX_LOGPROB_IDS, AbortName, KeptTokens, Priority, TokenIds
from tureen.http.dialect import Docs, Entry, client_name, unless_gone
from tureen.requests import batching, pairs, planning, prompts, tokenising
from tureen.requests.batching import Requester
from tureen.requests.drafts import Options
from tureen.requests.generation import Output
from tureen.requests.model_field import adapter_of, check_kind
from tureen.requests.pairs import Pair
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.reranking import RerankOptions, rank, score_pairs
from tureen.requests.state import Context, ServerState

MAX_JOINED = 1 << 27
"""Most characters or token ids of all prompts of a body together; each has the query in it."""

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
        "Return the probabilities of tokens after each text, or score pairs of texts.",
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
    drafts = batching.draft_of(resolved, names, pairs.ONE_TOKEN, options, requester)
    outputs = await batching.run_all(drafts, requester, state)
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
    batching.check_count(len(items), "items")
    texts: list[Pair] = []
    for name, item in zip(names, items, strict=True):
        if not isinstance(item, str) or not isinstance(body.query, str):
            raise InvalidRequest("query and items must be texts: this model scores pairs of them", field=name)
        texts.append(Pair(item, body.query) if body.item_first else Pair(body.query, item))
    _check_not_empty(texts, names)
    scored = await score_pairs(texts, names, RerankOptions(priority=body.priority), requester, state)
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
        raise InvalidRequest("items must be texts if query is a text, otherwise lists of token ids", field="items")
    query: Any = body.query
    joined = sum(map(len, items)) + len(items) * len(query)
    if joined > MAX_JOINED:
        raise InvalidRequest(
            f"query is part of {len(items)} prompts: together they may have {MAX_JOINED} characters or token ids, got "
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
    names = [f"documents[{index}]" for index in range(len(body.documents))]
    batching.check_count(len(names), "documents")
    adapter_of(body.model, state)
    how = RerankOptions(body.instruct, body.truncate_prompt_tokens, body.priority)
    results = []
    for ranked in await rank(body.query, body.documents, names, how, requester, state):
        result: dict[str, Any] = {"score": ranked.score, "index": ranked.position}
        if body.return_documents:
            result["document"] = body.documents[ranked.position]
        result["meta_info"] = {"id": ranked.output.rid, "prompt_tokens": ranked.output.usage.prompt_tokens}
        results.append(result)
    return results[: body.top_n]
