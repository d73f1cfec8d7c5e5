"""Serves `/props`, `/slots`, and the bodies of `/tokenize` that have `content`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen import __version__
from tureen.dialects.llamacpp.answer import LLAMA_ERROR, error_response
from tureen.dialects.llamacpp.body import DEFAULTS, TABLES
from tureen.errors import InvalidRequest, Unavailable
from tureen.fields.body import convert, offered
from tureen.http.dialect import Docs, Entry, read_body_with
from tureen.requests import tokenising
from tureen.requests.offload import offload
from tureen.requests.state import Context, ServerState
from tureen.text.tokenizer import Tokenizer


class LlamaTokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /tokenize` with `content`."""

    content: Annotated[str, Meta(description="The text.")]
    add_special: Annotated[bool, Meta(description="Add the tokens that the tokenizer adds around a text.")] = False
    with_pieces: Annotated[bool, Meta(description="Return each token's text too.")] = False


class SlotsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `GET /slots`."""

    fail_on_no_slot: Annotated[str | None, Meta(description="1: a 503 when all slots are in use.")] = None


def routes(state: ServerState) -> list[Entry]:
    """Return the routes."""

    async def props(_: Request) -> Response:
        return JSONResponse(properties(state))

    async def slots(request: Request) -> Response:
        running, total = state.client.stats.num_running, state.context.info.max_running_requests
        if request.query_params.get("fail_on_no_slot") == "1" and running >= total:
            raise Unavailable("all slots are in use; try again later", code="no_slot")
        return JSONResponse([_slot(index, running, state) for index in range(total)])

    async def tokenize(request: Request) -> Response:
        def read(payload: dict[str, Any]) -> LlamaTokenizeBody:
            table = TABLES["tokenize"]
            for other in ("prompt", "text", "messages"):
                if payload.get(other) is not None:
                    raise InvalidRequest(f"content and {other} are both what to tokenize; send one", field=other)
            return convert(offered(payload, LlamaTokenizeBody.__struct_fields__, table), LlamaTokenizeBody, table=table)

        body = await read_body_with(request, read, of_any_type=True)
        tokenizer = state.context.tokenizer
        [ids] = await tokenising.encode([body.content], tokenizer, add_special_tokens=body.add_special)
        if not body.with_pieces:
            return _tokens(ids)
        return _tokens(await offload.run(len(ids), lambda: [_piece(token_id, tokenizer) for token_id in ids]))

    about = Docs("llama.cpp", "The defaults, the template and the capabilities of the model.", error=LLAMA_ERROR)
    about_slots = about._replace(summary="The slots that requests use.", query=SlotsQuery)
    about_tokens = about._replace(
        summary="Tokenize a text.", bodies=(LlamaTokenizeBody,), example={"content": "The capital of France"}
    )
    tokenizing = Entry(
        "/tokenize",
        tokenize,
        access="user",
        methods=["POST"],
        any_model=True,
        docs=about_tokens,
        render_error=error_response,
    )
    tokenizing.fields = ("content",)
    return [
        Entry("/props", props, access="user", docs=about, render_error=error_response),
        Entry("/slots", slots, access="user", docs=about_slots, render_error=error_response),
        tokenizing,
    ]


def properties(state: ServerState) -> dict[str, Any]:
    """Return the answer of `/props`."""
    context, info = state.context, state.context.info
    templates, server = context.chat_templates, context.defaults[0]
    params = DEFAULTS | {name: value for name, value in server.items() if name in DEFAULTS}
    most = params.pop("max_new_tokens")
    return {
        "default_generation_settings": {
            "n_ctx": context.capacity,
            "params": params | {"n_predict": -1 if most is None else most, "seed": 2**32 - 1, "repeat_penalty": 1.0},
        },
        "total_slots": info.max_running_requests,
        "model_alias": info.model_name,
        "model_path": info.model_path,
        "chat_template": "" if isinstance(templates, str) else templates.plain.source,
        "chat_template_caps": {},
        "modalities": {"vision": state.media is not None, "audio": False},
        "bos_token": _text(info.bos_token_id, context.tokenizer),
        "eos_token": _eos(context),
        "build_info": f"tureen {__version__}",
        "is_sleeping": False,
    }


def _slot(index: int, running: int, state: ServerState) -> dict[str, Any]:
    return {
        "id": index,
        "id_task": -1,
        "n_ctx": state.context.capacity,
        "speculative": False,
        "is_processing": index < running,
    }


def _tokens(tokens: Sequence[Any]) -> Response:
    return Response(msgspec.json.encode({"tokens": tokens}), media_type="application/json")


def _eos(context: Context) -> str:
    """Return the text of the tokenizer's own end token, or else of the model's first one."""
    named, ids = context.tokenizer.named_tokens.get("eos_token"), context.info.eos_token_ids
    return named or _text(ids[0] if ids else None, context.tokenizer)


def _text(token_id: int | None, tokenizer: Tokenizer) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


def _piece(token_id: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a token with its text, or its bytes if they are no whole characters."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": spelled.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(spelled)}
