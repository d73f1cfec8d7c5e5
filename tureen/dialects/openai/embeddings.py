"""Serves OpenAI's `/v1/embeddings`.

Source: https://platform.openai.com/docs/api-reference/embeddings
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.dialects.openai.body import Label
from tureen.errors import InvalidRequest, echo
from tureen.fields.body import convert, offered, read_json
from tureen.fields.rules import read_tables
from tureen.fields.shared import MAX_INPUTS, AbortName, Inputs, KeptTokens, Priority
from tureen.http.dialect import Docs, Entry, client_name, unless_gone
from tureen.log import get_logger
from tureen.requests import batching, embedding, planning, prompts
from tureen.requests.batching import Requester
from tureen.requests.embedding import EmbeddingOptions, PoolingField
from tureen.requests.generation import Output
from tureen.requests.model_field import adapter_of, check_kind
from tureen.requests.offload import offload
from tureen.requests.prompts import Texts
from tureen.requests.state import ServerState

TABLE = read_tables(Path(__file__).with_name("fields.toml"))["embeddings"]

log = get_logger("api")


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/embeddings`."""

    input: Annotated[
        str | Inputs,
        Meta(description="A text, token ids, or a list of texts or of lists of ids; at most 2048."),
    ]
    model: Annotated[str | None, Meta(description="The served model, or an adapter.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"], Meta(description="base64: the bytes of little-endian float32 numbers.")
    ] = "float"
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Cut embeddings to this many numbers; for models that were trained for it."),
    ] = None
    pooling: Annotated[
        PoolingField | None,
        Meta(
            description="How the embedding is made: the last token's hidden state, or the mean of all. Default: as a "
            "GGUF file says, else last; of an embedding model, its own way, which is the only one it has."
        ),
    ] = None
    prompt_name: Annotated[
        str | None,
        Meta(
            description="The prompt of the model's authors that is put before each text, such as query or document. "
            "Default: as the model's files say, else none."
        ),
    ] = None
    normalize: Annotated[bool, Meta(description="Scale embeddings to length 1.")] = True
    truncate_prompt_tokens: KeptTokens = None
    user: Annotated[Label | None, Meta(description="Name of the end user; logged at level debug.")] = None
    rid: AbortName = None
    priority: Priority = 0


def routes(state: ServerState) -> list[Entry]:
    """Returns the route of this API."""

    async def embeddings(request: Request) -> ASGIApp:
        payload = read_json(request.headers.get("content-type"), await request.body())
        state.check_accepting()
        body = parse(payload)
        outputs = await unless_gone(request, _outputs(body, Requester(client_name(request), body.rid), state))
        size = len(outputs) * state.context.info.hidden_size
        return Response(await offload.run(size, lambda: _answer(outputs, body, state)), media_type="application/json")

    docs = Docs(
        "OpenAI",
        "Embed texts.",
        bodies=(EmbeddingsBody,),
        example={"input": ["A cat sleeps on the sofa.", "A kitten naps on the couch."]},
    )
    return [Entry("/v1/embeddings", embeddings, access="user", methods=["POST"], any_model=True, docs=docs)]


def parse(payload: dict[str, Any]) -> EmbeddingsBody:
    """Checks a JSON body's form. Raises InvalidRequest."""
    return convert(offered(payload, EmbeddingsBody.__struct_fields__, TABLE), EmbeddingsBody, table=TABLE)


async def _outputs(body: EmbeddingsBody, requester: Requester, state: ServerState) -> list[Output]:
    info = state.context.info
    check_kind(info, "embedder", "generator")
    planning.check_priority(body.priority, state.context)
    embedding.check_dimensions(body.dimensions, info)
    if body.user is not None:
        log.debug("embeddings for user %s", echo(body.user))
    options = EmbeddingOptions(
        embedding.states_for(body.pooling, info),
        body.truncate_prompt_tokens,
        adapter_of(body.model, state),
        body.priority,
    )
    inputs, names = prompts.texts_or_ids(
        body.input, "input", state.context, max_prompts=MAX_INPUTS, may_be_cut=body.truncate_prompt_tokens is not None
    )
    batching.check_count(len(names), "input")
    prompt = embedding.prompt_text(body.prompt_name, info)
    if isinstance(inputs, Texts):
        inputs = Texts([prompt + text for text in inputs.texts], inputs.names)
    elif body.prompt_name is not None:
        raise InvalidRequest("prompt_name goes with texts, and input has token ids; leave it out", field="prompt_name")
    return await embedding.embed(inputs, names, options, requester, state)


def _answer(outputs: Sequence[Output], body: EmbeddingsBody, state: ServerState) -> bytes:
    num_tokens = sum(output.usage.prompt_tokens for output in outputs)
    num_cached = sum(output.usage.cached_tokens for output in outputs)
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _render(output, body)}
                for index, output in enumerate(outputs)
            ],
            "model": body.model or state.context.info.model_name,
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "prompt_tokens_details": {"cached_tokens": num_cached},
            },
        }
    )


def _render(output: Output, body: EmbeddingsBody) -> list[float] | str:
    vector = embedding.vector_of(output)[: body.dimensions]
    if body.normalize:
        vector = embedding.normalised(vector)
    numbers = vector.astype("<f4")
    if body.encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    return [float(number) for number in numbers]
