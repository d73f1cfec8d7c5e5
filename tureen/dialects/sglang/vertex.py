"""Serves `/vertex_generate`, `/generate` as Vertex AI calls it.

Source: SGLang's server, python/sglang/srt/entrypoints/http_server.py, and
https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.config import MAX_PROMPTS
from tureen.contract.params import JsonObject
from tureen.dialects.sglang import generate
from tureen.dialects.sglang.body import References
from tureen.dialects.sglang.from_file import check_parameters
from tureen.errors import InvalidRequest
from tureen.fields.shared import TokenIds
from tureen.http.dialect import Docs, Entry, client_name, prepared, read_body, unless_gone
from tureen.requests.media_fields import MediaReference
from tureen.requests.state import ServerState


class VertexInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, as `text` or `input_ids`."""

    text: Annotated[str | None, Meta(description="The prompt.")] = None
    input_ids: Annotated[TokenIds | None, Meta(description="Token ids in place of text.")] = None
    image_data: Annotated[
        MediaReference | References | None, Meta(description="Pictures for the prompt's placeholders, as in /generate.")
    ] = None


class VertexBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /vertex_generate`."""

    instances: Annotated[
        Annotated[list[VertexInstance], Meta(max_length=MAX_PROMPTS)],
        Meta(description="Prompts, up to --max-batch-size; all texts, or all token ids."),
    ]
    parameters: Annotated[
        JsonObject, Meta(description="The other fields of /generate, such as sampling_params; no stream.")
    ] = msgspec.field(default_factory=dict)


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def vertex_generate(request: Request) -> ASGIApp:
        body = await read_body(request, VertexBody)
        state.check_accepting()
        if not body.instances:
            return Response(b"[]", media_type="application/json")
        fields = _generate_fields(body)
        brings_media = "image_data" in fields
        plan = await prepared(
            request, generate.prepare(fields, state, owner=client_name(request)), takes_time=brings_media
        )
        answers = await unless_gone(request, generate.answer(plan, state))
        return Response(await generate.encode({"predictions": answers}, answers), media_type="application/json")

    about_vertex = Docs(
        "SGLang",
        "Generate text, in Vertex AI's form.",
        bodies=(VertexBody,),
        example={"instances": [{"text": "Paris is"}], "parameters": {"sampling_params": {"max_new_tokens": 4}}},
    )
    return [
        Entry("/vertex_generate", vertex_generate, access="user", methods=["POST"], docs=about_vertex),
    ]


def _generate_fields(body: VertexBody) -> dict[str, Any]:
    """Returns the body of `/generate` that is meant. Raises InvalidRequest."""
    check_parameters(body.parameters)
    name = "text" if body.instances[0].text is not None else "input_ids"
    for index, instance in enumerate(body.instances):
        if getattr(instance, name) is None or (instance.text is not None and instance.input_ids is not None):
            raise InvalidRequest(
                f"instances[{index}] must have {name}, as the first one has, and no other prompt", field="instances"
            )
    fields = body.parameters | {name: [getattr(instance, name) for instance in body.instances]}
    if any(instance.image_data is not None for instance in body.instances):
        fields["image_data"] = [instance.image_data for instance in body.instances]
    return fields
