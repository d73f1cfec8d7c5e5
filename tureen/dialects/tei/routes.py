"""Serves the API of Text Embeddings Inference: `/embed`, `/similarity`, `/rerank`, `/predict`, and refuses what needs
another model.

Source: https://huggingface.github.io/text-embeddings-inference/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen import __version__
from tureen.errors import InvalidRequest, TureenError
from tureen.fields.body import convert, offered
from tureen.fields.rules import read_tables
from tureen.fields.shared import MAX_INPUTS, Inputs
from tureen.http.dialect import PLAIN_ERROR, Docs, Entry, client_name, read_body_with, unless_gone
from tureen.http.errors import error_answer
from tureen.requests import batching, embedding, pairs, prompts
from tureen.requests.batching import Requester
from tureen.requests.embedding import EmbeddingOptions
from tureen.requests.model_field import check_kind
from tureen.requests.offload import offload
from tureen.requests.pairs import Pair
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.reranking import WHOLE_CONTEXT, RerankOptions, rank
from tureen.requests.state import ServerState

TABLES = read_tables(Path(__file__).with_name("fields.toml"))
ERROR_TYPES = {422: "validation", 413: "validation", 424: "backend", 429: "overloaded", 503: "overloaded"}
WRONG_MODEL = ("not_an_embedding_model", "not_a_classification_model", "not_a_reranker", "no_such_model")
NOT_HERE = {
    "/embed_sparse": "no model here has a SPLADE head, which sparse embeddings need; send /embed",
    "/embed_all": "embeddings of single tokens are not kept; send /embed for that of a text",
}
"""Routes of the original that answer with the reason why they are not here."""

Truncate = Annotated[bool, Meta(description="Truncate a text that is longer than the context; false refuses it.")]
Direction = Annotated[
    Literal["Right", "right", "Left", "left"],
    Meta(description="Right keeps the first tokens. Left is refused with truncate: true."),
]
Words = Annotated[list[str], Meta(min_length=1, max_length=2)]


class TeiEmbedBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /embed`."""

    inputs: Annotated[
        str | Inputs, Meta(description="A text, token ids, or a list of texts or of lists of ids; at most 2048.")
    ]
    normalize: Annotated[bool, Meta(description="Scale embeddings to length 1.")] = True
    prompt_name: Annotated[
        str | None, Meta(description="The model's prompt that is put before each text. Default: none.")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Cut embeddings to this many numbers; for models that were trained for it."),
    ] = None
    truncate: Truncate = False
    truncation_direction: Direction = "Right"


class TeiRerankBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /rerank` with `texts`."""

    query: Annotated[str, Meta(description="The text that texts are compared with.", min_length=1)]
    texts: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(description="Texts to order; at most 2048.", min_length=1, max_length=MAX_INPUTS),
    ]
    raw_scores: Annotated[bool, Meta(description="Return a cross-encoder's logits.")] = False
    return_text: Annotated[bool, Meta(description="Return the texts too.")] = False
    truncate: Truncate = False
    truncation_direction: Direction = "Right"


class TeiPredictBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /predict`."""

    inputs: Annotated[
        str | Annotated[list[str | Words], Meta(min_length=1, max_length=MAX_INPUTS)],
        Meta(description="A text; a pair of texts; or a list of lists, of one text or a pair each, at most 2048."),
    ]
    raw_scores: Annotated[bool, Meta(description="Return the classifier's logits.")] = False
    truncate: Truncate = False
    truncation_direction: Direction = "Right"


class TeiSentences(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The texts of `POST /similarity`."""

    source_sentence: Annotated[str, Meta(min_length=1, description="The text that sentences are compared with.")]
    sentences: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(min_length=1, max_length=MAX_INPUTS - 1, description="Texts to compare; at most 2047."),
    ]


class TeiSimilarityParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `parameters` of `POST /similarity`."""

    prompt_name: Annotated[
        str | None, Meta(description="The model's prompt that is put before each text. Default: none.")
    ] = None
    truncate: Truncate = False
    truncation_direction: Direction = "Right"


class TeiSimilarityBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /similarity`."""

    inputs: Annotated[TeiSentences, Meta(description="A text, and the texts to compare it with.")]
    parameters: Annotated[TeiSimilarityParameters, Meta(description="How texts are embedded.")] = (
        TeiSimilarityParameters()
    )


B = TypeVar("B", TeiEmbedBody, TeiRerankBody, TeiPredictBody, TeiSimilarityBody)


def routes(state: ServerState) -> list[Entry]:
    """Return the routes of this API."""

    async def embed(request: Request) -> ASGIApp:
        body = await _read(request, TeiEmbedBody, "embed", state)
        return _response(await unless_gone(request, _embed(body, _asker(request), state)))

    async def rerank(request: Request) -> ASGIApp:
        body = await _read(request, TeiRerankBody, "rerank", state)
        return _response(await unless_gone(request, _rerank(body, _asker(request), state)))

    async def predict(request: Request) -> ASGIApp:
        body = await _read(request, TeiPredictBody, "predict", state)
        return _response(await unless_gone(request, _predict(body, _asker(request), state)))

    async def similarity(request: Request) -> ASGIApp:
        body = await _read(request, TeiSimilarityBody, "similarity", state)
        return _response(await unless_gone(request, _similarity(body, _asker(request), state)))

    async def refuse(request: Request) -> ASGIApp:
        raise InvalidRequest(NOT_HERE[request.url.path], code="no_such_model")

    async def info(_: Request) -> ASGIApp:
        return _response(facts(state))

    texts = {"query": "pets", "texts": ["A cat sleeps.", "Taxes rise."]}
    ranking = _entry("/rerank", rerank, TeiRerankBody, "Order texts by how well they answer a query.", texts)
    ranking.fields = ("texts",)
    sentences = {"inputs": {"source_sentence": "pets", "sentences": ["A cat sleeps.", "Taxes rise."]}}
    about = Docs("TEI", "The model, and how much of it a request may use.", error=PLAIN_ERROR)
    return [
        Entry("/info", info, access="user", any_model=True, docs=about, render_error=error_response),
        *(
            Entry(
                path,
                refuse,
                access="user",
                methods=["POST"],
                any_model=True,
                docs=about._replace(summary=f"Not here: {why}.", statuses={424: "This route is not here."}),
                render_error=error_response,
            )
            for path, why in NOT_HERE.items()
        ),
        _entry("/similarity", similarity, TeiSimilarityBody, "How similar texts are to one.", sentences),
        _entry("/embed", embed, TeiEmbedBody, "Embed texts.", {"inputs": ["A cat sleeps on the sofa."]}),
        ranking,
        _entry("/predict", predict, TeiPredictBody, "The scores of a classifier's labels.", {"inputs": "Great!"}),
    ]


def _entry(
    path: str, endpoint: Callable[..., Any], body: type[msgspec.Struct], summary: str, example: dict[str, Any]
) -> Entry:
    docs = Docs("TEI", summary, bodies=(body,), example=example, error=PLAIN_ERROR)
    return Entry(
        path, endpoint, access="user", methods=["POST"], any_model=True, docs=docs, render_error=error_response
    )


def error_response(error: TureenError) -> Response:
    """Return an error as an answer with TEI's body and status. TEI has no field for the name of the wrong field."""
    status = error.status
    if error.code in WRONG_MODEL:
        status = 424
    elif status == 400:
        status = 422
    elif status == 500:
        status = 424
    kind = ERROR_TYPES.get(status, "validation" if status < 500 else "unhealthy")
    is_named = error.field is None or error.field in error.message
    message = error.message if is_named else f"{error.field}: {error.message}"
    return error_answer(error, {"error": message, "error_type": kind}, status)


async def _read(request: Request, kind: type[B], table: str, state: ServerState) -> B:
    def read(payload: dict[str, Any]) -> B:
        return convert(offered(payload, kind.__struct_fields__, TABLES[table]), kind, table=TABLES[table])

    state.check_accepting()
    body = await read_body_with(request, read)
    how, inside = (body.parameters, "parameters.") if isinstance(body, TeiSimilarityBody) else (body, "")
    if how.truncate and how.truncation_direction.lower() == "left":
        field = f"{inside}truncation_direction"
        raise InvalidRequest(f"{field} must be Right with truncate: true, got {how.truncation_direction}", field=field)
    return body


def _asker(request: Request) -> Requester:
    return Requester(client_name(request))


def _response(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _limit(*, truncate: bool) -> int | None:
    return WHOLE_CONTEXT if truncate else None


def facts(state: ServerState) -> dict[str, Any]:
    """Return the answer of `/info`: TEI's, with TGI's fields for a model that generates."""
    info, config, capacity = state.context.info, state.context.config, state.context.capacity
    about: dict[str, Any] = {
        "model_id": info.model_name,
        "model_sha": None,
        "model_dtype": info.dtype,
        "max_concurrent_requests": config.max_queued_requests,
        "max_input_length": capacity,
        "max_batch_tokens": info.max_total_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    if info.classifier is not None:
        labels = dict(enumerate(info.classifier.labels))
        kind = "reranker" if len(labels) == 1 else "classifier"
        about["model_type"] = {kind: {"id2label": labels, "label2id": {label: id for id, label in labels.items()}}}
    elif info.pooling is not None:
        about["model_type"] = {"embedding": {"pooling": "last_token" if info.pooling == "last" else info.pooling}}
    else:
        about |= {"max_total_tokens": capacity, "max_input_tokens": capacity - 1, "max_best_of": config.max_n}
        about["max_stop_sequences"] = config.max_stop_strings
    return about


async def _similarity(body: TeiSimilarityBody, requester: Requester, state: ServerState) -> list[float]:
    check_kind(state.context.info, "embedder", "generator")
    names = ["inputs.source_sentence", *(f"inputs.sentences[{index}]" for index in range(len(body.inputs.sentences)))]
    inputs = Texts([body.inputs.source_sentence, *body.inputs.sentences], names)
    how = TeiEmbedBody(inputs="", **msgspec.structs.asdict(body.parameters))
    source, *vectors = await _vectors(inputs, names, how, "parameters.prompt_name", requester, state)
    return await offload.run(sum(map(len, vectors)), lambda: (np.array(vectors) @ np.array(source)).tolist())


async def _embed(body: TeiEmbedBody, requester: Requester, state: ServerState) -> list[list[float]]:
    info = state.context.info
    check_kind(info, "embedder", "generator")
    embedding.check_dimensions(body.dimensions, info)
    inputs, names = prompts.texts_or_ids(
        body.inputs, "inputs", state.context, max_prompts=MAX_INPUTS, may_be_cut=body.truncate
    )
    batching.check_count(len(names), "inputs")
    return await _vectors(inputs, names, body, "prompt_name", requester, state)


async def _vectors(
    inputs: Texts | list[Prompt],
    names: Sequence[str],
    body: TeiEmbedBody,
    prompt_field: str,
    requester: Requester,
    state: ServerState,
) -> list[list[float]]:
    """Return the embeddings of inputs, as `body` asks for them. `names`: what errors call each; `prompt_field`: what
    they call prompt_name."""
    info = state.context.info
    if body.prompt_name is not None:
        before = embedding.prompt_text(body.prompt_name, info, prompt_field)
        if not isinstance(inputs, Texts):
            raise InvalidRequest(
                "prompt_name goes with texts, and inputs has token ids; leave it out", field="prompt_name"
            )
        inputs = Texts([before + text for text in inputs.texts], inputs.names)
    options = EmbeddingOptions(embedding.states_for(None, info), _limit(truncate=body.truncate))
    outputs = await embedding.embed(inputs, names, options, requester, state)
    vectors = [embedding.vector_of(output)[: body.dimensions] for output in outputs]
    size = len(vectors) * info.hidden_size
    return await offload.run(
        size, lambda: [(embedding.normalised(vector) if body.normalize else vector).tolist() for vector in vectors]
    )


async def _rerank(body: TeiRerankBody, requester: Requester, state: ServerState) -> list[dict[str, Any]]:
    if body.raw_scores and state.context.info.classifier is None:
        raise InvalidRequest("raw_scores: only cross-encoders have raw scores; leave it out", field="raw_scores")
    batching.check_count(len(body.texts), "texts")
    names = [f"texts[{index}]" for index in range(len(body.texts))]
    how = RerankOptions(truncate=_limit(truncate=body.truncate), raw=body.raw_scores)
    return [
        {"index": ranked.position, "score": ranked.score}
        | ({"text": body.texts[ranked.position]} if body.return_text else {})
        for ranked in await rank(body.query, body.texts, names, how, requester, state)
    ]


async def _predict(body: TeiPredictBody, requester: Requester, state: ServerState) -> list[Any]:
    check_kind(state.context.info, "classifier")
    classifier = state.context.info.classifier
    assert classifier is not None
    texts, is_batch = _texts_of(body)
    names = [f"inputs[{index}]" for index in range(len(texts))] if is_batch else ["inputs"]
    for pair, name in zip(texts, names, strict=True):
        if not pair.first or pair.second == "":
            raise InvalidRequest(f"{name} has an empty text", field=name, code="empty_prompt")
    activation = "identity" if body.raw_scores else classifier.label_activation
    scored = await pairs.classify(texts, names, activation, requester, state, truncate=_limit(truncate=body.truncate))
    predictions = [_labelled(entry.scores.tolist(), classifier.labels) for entry in scored]
    return predictions if is_batch else predictions[0]


def _texts_of(body: TeiPredictBody) -> tuple[list[Pair], bool]:
    """Return the texts and pairs of a body, and whether they are a batch. A list of one text or two is one input."""
    if isinstance(body.inputs, str):
        return [Pair(body.inputs)], False
    lists = [entry for entry in body.inputs if isinstance(entry, list)]
    if len(lists) == len(body.inputs):
        return [Pair(*entry) for entry in lists], True
    strings = [entry for entry in body.inputs if isinstance(entry, str)]
    if len(strings) < len(body.inputs) or len(strings) > 2:
        raise InvalidRequest(
            "inputs must be a text, a pair of texts, or a list of lists with one text or a pair each", field="inputs"
        )
    return [Pair(*strings)], False


def _labelled(scores: Sequence[float], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the labels with their scores, the best first."""
    best_first = sorted(zip(scores, labels, strict=True), key=lambda entry: -entry[0])
    return [{"score": score, "label": label} for score, label in best_first]
