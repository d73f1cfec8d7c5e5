"""Ranks documents by their relevance to a query, for every API with such a route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tureen.contract.types import EngineInfo
from tureen.errors import InvalidRequest
from tureen.requests import embedding, pairs, planning, tokenising
from tureen.requests.batching import Requester
from tureen.requests.embedding import EmbeddingOptions
from tureen.requests.generation import Output
from tureen.requests.offload import offload
from tureen.requests.pairs import Pair, Scored
from tureen.requests.prompts import Texts
from tureen.requests.state import Context, ServerState

QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names that models' files use for the prompts of queries and of documents."""

WHOLE_CONTEXT = -1
"""The value of `RerankOptions.truncate` that cuts a pair to what the model takes."""


class RerankOptions(NamedTuple):
    """A body's options for scoring documents."""

    instruct: str | None = None  # the task, for a reranker that takes one
    truncate: int | None = None  # most tokens of a pair; WHOLE_CONTEXT = as many as the model takes
    priority: int = 0
    raw: bool = False  # a cross-encoder's logits instead of its scores
    document_tokens: int | None = None  # most tokens of a document; None = as many as the pair takes


class ScoredDocument(NamedTuple):
    """The score of a document, its position in the body, and the request that computed it."""

    score: float
    position: int
    output: Output


async def rank(
    query: str,
    documents: Sequence[str],
    names: Sequence[str],
    how: RerankOptions,
    requester: Requester,
    state: ServerState,
) -> list[ScoredDocument]:
    """Return the documents' scores, the best first.

    `names`: what errors call each document. Raises InvalidRequest for a model that cannot rank.
    """
    info = state.context.info
    if info.kind == "generator" and info.judge is None:
        raise InvalidRequest(
            "this is a generative model; serve a reranker or embedding model (--model-path minilm), or send /v1/score",
            code="not_an_embedding_model",
        )
    if how.instruct is not None and info.judge is None:
        raise InvalidRequest("instruct: this model does not take an instruction; leave it out", field="instruct")
    planning.check_priority(how.priority, state.context)
    if how.document_tokens is not None:
        documents = await _cut(documents, how.document_tokens, state.context)
    if info.kind == "embedder":
        scores = await _similarities(query, documents, names, how, requester, state)
    else:
        scored = await score_pairs([Pair(query, document) for document in documents], names, how, requester, state)
        scores = [(float(pair.scores[0]), pair.output) for pair in scored]
    ranked = [ScoredDocument(score, index, output) for index, (score, output) in enumerate(scores)]
    return sorted(ranked, key=lambda document: -document.score)


async def score_pairs(
    texts: Sequence[Pair], names: Sequence[str], how: RerankOptions, requester: Requester, state: ServerState
) -> list[Scored]:
    """Score pairs by the classifier or the judge that the model is. Raises InvalidRequest for a classifier with more
    than one label, whose scores have no order."""
    classifier = state.context.info.classifier
    if classifier is None:
        return await pairs.judge(
            texts, names, how.instruct, requester, state, truncate=how.truncate, priority=how.priority
        )
    if len(classifier.labels) > 1:
        raise InvalidRequest(
            f"this model has {len(classifier.labels)} labels, but a score needs a model with one label; use /classify",
            code="not_a_reranker",
        )
    activation = "identity" if how.raw else classifier.pair_activation
    return await pairs.classify(
        texts, names, activation, requester, state, truncate=how.truncate, priority=how.priority
    )


async def _cut(texts: Sequence[str], most: int, context: Context) -> list[str]:
    """Return the texts, each cut to its first `most` tokens. Tokenize only the beginning of a text that contains these
    tokens."""
    most = min(most, context.capacity)

    def kept(text: str) -> str:
        read = tokenising.beginning(text, most, context.tokenizer)
        offsets = context.tokenizer.backend.encode(read, add_special_tokens=False).offsets
        return text[: offsets[most - 1][1]] if len(offsets) > most else text

    return await offload.run_each(sum(map(len, texts)), kept, texts)


async def _similarities(
    query: str,
    documents: Sequence[str],
    names: Sequence[str],
    how: RerankOptions,
    requester: Requester,
    state: ServerState,
) -> list[tuple[float, Output]]:
    """Return the similarity of each document's embedding to the query's."""
    info = state.context.info
    options = EmbeddingOptions(embedding.states_for(None, info), how.truncate, priority=how.priority)
    before_query, before_document = (_prompt(names_of, info) for names_of in (QUERY_PROMPTS, DOCUMENT_PROMPTS))
    texts = [before_query + query, *(before_document + document for document in documents)]
    all_names = ["query", *names]
    first, *others = await embedding.embed(Texts(texts, all_names), all_names, options, requester, state)
    vectors = [embedding.vector_of(output) for output in (first, *others)]
    if info.similarity == "cosine":
        vectors = [embedding.normalised(vector) for vector in vectors]
    return [(float(np.dot(vectors[0], vector)), output) for vector, output in zip(vectors[1:], others, strict=True)]


def _prompt(names: Sequence[str], info: EngineInfo) -> str:
    """Return the first prompt of these names that the model has, else its default."""
    return embedding.prompt_text(next((name for name in names if name in info.prompts), None), info)
