"""Serves Ollama's `/api/embed` and the older `/api/embeddings`.

Source: https://docs.ollama.com/api/embed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from tureen.clients.quotas import current_work
from tureen.contract.params import JsonObject
from tureen.dialects.ollama.body import TABLES, OllamaOptions, check_context, check_keep_alive
from tureen.fields.body import convert, offered
from tureen.fields.rules import FieldTable, FieldWithoutEffect
from tureen.fields.shared import MAX_INPUTS
from tureen.http.dialect import client_name, unless_gone
from tureen.requests import batching, embedding
from tureen.requests.batching import Requester
from tureen.requests.embedding import EmbeddingOptions
from tureen.requests.generation import Output
from tureen.requests.model_field import adapter_of, check_kind
from tureen.requests.prompts import Texts, texts
from tureen.requests.state import Context, ServerState

AS_FITS = -1
NS = 1_000_000_000

TABLE = TABLES["embed"]
OPTIONS_TABLE = TABLES["options"].joined(
    FieldTable(
        told=dict.fromkeys(
            sorted({*OllamaOptions.__struct_fields__, *TABLES["options"].refused} - {"num_ctx"}),
            FieldWithoutEffect("embeddings sample no tokens"),
        )
    )
)
"""The verdicts on the options of an embedding, most of which say how a text is generated."""

Body = TypeVar("Body", bound="OllamaEmbeddingBody")


class OllamaEmbeddingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both routes have."""

    model: Annotated[str, Meta(description="The served model or one of its adapters; `:latest` may follow.")]
    options: Annotated[
        JsonObject, Meta(description="Only num_ctx is read; options for generation are reported as ignored.")
    ] = msgspec.field(default_factory=dict)
    keep_alive: Annotated[float | str | None, Meta(description="0 unloads one of several models after the answer.")] = (
        None
    )


class OllamaEmbedBody(OllamaEmbeddingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /api/embed`."""

    input: Annotated[
        str | Annotated[list[str], Meta(max_length=MAX_INPUTS)],
        Meta(description="A text, or a list of texts. Empty: the answer says that the model is loaded."),
    ] = ""
    truncate: Annotated[
        bool, Meta(description="Cut a text that is longer than the context at its end; false refuses it.")
    ] = True
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Cut embeddings to this many numbers; for models that were trained for it."),
    ] = None


class OllamaEmbeddingsBody(OllamaEmbeddingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /api/embeddings`, the older route."""

    prompt: Annotated[str, Meta(description="The text. Empty: the answer says that the model is loaded.")] = ""


def parse(payload: Mapping[str, Any], kind: type[Body], context: Context) -> Body:
    """Checks a JSON body's form and returns it as `kind`. Raises InvalidRequest."""
    body = convert(offered(payload, kind.__struct_fields__, TABLE), kind, table=TABLE)
    options = offered(body.options, ("num_ctx",), OPTIONS_TABLE, "options")
    check_context(convert(options, OllamaOptions, "options.{}".format).num_ctx, context)
    check_keep_alive(body.keep_alive)
    return body


async def embed(body: OllamaEmbedBody, request: Request, state: ServerState) -> dict[str, Any]:
    """Returns the answer of `/api/embed`: embeddings of length 1, and counts. Raises InvalidRequest, NotFound."""
    embedding.check_dimensions(body.dimensions, state.context.info)
    input_texts = [body.input] if isinstance(body.input, str) else body.input
    outputs = await _outputs(
        [] if input_texts == [""] else input_texts, "input", body, request, state, cuts=body.truncate
    )
    vectors = [embedding.normalised(embedding.vector_of(output)[: body.dimensions]) for output in outputs]
    load_s = current_work().load_wait_s
    return {
        "model": body.model,
        "embeddings": [vector.astype("<f4").tolist() for vector in vectors],
        "total_duration": round(max((output.elapsed_s for output in outputs), default=load_s) * NS),
        "load_duration": round(load_s * NS),
        "prompt_eval_count": sum(output.usage.prompt_tokens for output in outputs),
    }


async def embed_prompt(body: OllamaEmbeddingsBody, request: Request, state: ServerState) -> dict[str, Any]:
    """Returns the answer of `/api/embeddings`: an embedding as the model has it. Raises InvalidRequest, NotFound."""
    outputs = await _outputs([body.prompt] if body.prompt else [], "prompt", body, request, state, cuts=True)
    vectors = [embedding.vector_of(output).astype("<f4").tolist() for output in outputs]
    return {"embedding": vectors[0] if vectors else []}


async def _outputs(
    input_texts: list[str], field: str, body: OllamaEmbeddingBody, request: Request, state: ServerState, *, cuts: bool
) -> list[Output]:
    """Computes texts; none at all only look for the model. `cuts`: those that are too long lose their ends."""
    state.check_accepting()
    info = state.context.info
    check_kind(info, "embedder", "generator")
    adapter = adapter_of(body.model, state)
    if not input_texts:
        return []
    named = texts(input_texts, field)
    batching.check_count(len(input_texts), field)
    before = embedding.prompt_text(None, info)
    inputs = Texts([before + text for text in named.texts], named.names)
    options = EmbeddingOptions(embedding.states_for(None, info), AS_FITS if cuts else None, adapter)
    requester = Requester(client_name(request))
    return await unless_gone(request, embedding.embed(inputs, inputs.names, options, requester, state))
