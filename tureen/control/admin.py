"""Serves health, facts about model and server, metrics, and the operations that flush the cache and abort requests."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tureen import __version__
from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.devices.cpu import trim
from tureen.errors import InvalidRequest, NotFound, Unavailable, echo
from tureen.http.call import call_of
from tureen.http.dialect import Docs, Entry, client_name
from tureen.requests.body import convert, read_json, refuse_unknown
from tureen.requests.drafts import Options, one_prompt, plan_of
from tureen.requests.embedding import states_for, vector_of
from tureen.requests.generation import Run
from tureen.requests.model_field import is_served
from tureen.requests.planning import Names, Sampling
from tureen.requests.prompts import Prompt
from tureen.requests.state import ServerState

HEALTH_TIMEOUT_S = 20.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /abort_request`, of which one is sent."""

    rid: Annotated[str | None, Meta(description="Id of a request, a batch or a sample.")] = None
    abort_all: Annotated[bool, Meta(description="Abort all requests; needs the admin key.")] = False


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""
    return [*_health_routes(state), *_fact_routes(state), *_control_routes(state)]


def _health_routes(state: ServerState) -> list[Entry]:
    def check() -> None:
        engine = state.client.health
        if engine.state != "healthy":
            raise Unavailable(
                f"the engine is {engine.state}: {engine.reason}",
                code="engine_dead" if engine.state == "down" else f"engine_{engine.state}",
                retry_after_s=engine.retry_after_s,
            )
        state.check_open()

    async def health(_: Request) -> Response:
        check()
        down = state.helpers_down
        return PlainTextResponse(f"being replaced: {', '.join(down)}\n" if down else "")

    async def health_generate(_: Request) -> Response:
        check()
        state.check_accepting()
        info = state.context.info
        is_generating = info.pooling is None
        sampling = Sampling(SamplingParams(max_new_tokens=int(is_generating), temperature=0.0), {}, Names())
        options = Options(hidden_states="none" if is_generating else states_for(None, info))
        prompt = Prompt([info.bos_token_id or 0])
        plan = plan_of(one_prompt(prompt, "prompt", sampling, options, log_metrics=False), state)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                [output] = await Run(state, plan).whole()
            if not is_generating:
                vector_of(output)
        except TimeoutError:
            raise Unavailable(f"no token within {HEALTH_TIMEOUT_S:.0f} s", code="engine_slow") from None
        return PlainTextResponse("")

    return [
        Entry("/health", health, access="open", docs=Docs("Server", "Whether it answers.", answer="text/plain")),
        Entry("/ready", health, access="open", docs=Docs("Server", "The same as /health.", answer="text/plain")),
        Entry("/ping", health, access="open", docs=Docs("Server", "The same, for SageMaker.", answer="text/plain")),
        Entry(
            "/health_generate",
            health_generate,
            access="open",
            docs=Docs("Server", "Whether it generates a token.", answer="text/plain"),
        ),
    ]


def _fact_routes(state: ServerState) -> list[Entry]:
    started = int(time.time())

    async def models(_: Request) -> Response:
        cards = [adapter_card(state, started, name) for name in state.adapters]
        return JSONResponse({"object": "list", "data": [model_card(state, started), *cards]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if is_served(name, state):
            return JSONResponse(model_card(state, started))
        if name not in state.adapters:
            raise NotFound(
                f"the model {echo(name)} does not exist; this server has "
                f"{', '.join((state.context.info.model_name, *state.adapters))}",
                field="model",
                code="model_not_found",
            )
        return JSONResponse(adapter_card(state, started, name))

    async def model_info(_: Request) -> Response:
        return JSONResponse(model_facts(state))

    async def server_info(_: Request) -> Response:
        return JSONResponse(server_facts(state))

    async def metrics(_: Request) -> Response:
        update_gauges(state)
        return Response(state.metrics.render(), media_type=METRICS_TYPE)

    async def version(_: Request) -> Response:
        return JSONResponse({"version": __version__})

    about_model = Docs("Server", "Facts about the model.")
    about_models, about_one = Docs("OpenAI", "The model and its adapters."), Docs("OpenAI", "One of them.")
    about_server = Docs("Server", "Settings, no secrets, and the engine's state.")

    return [
        *(Entry(f"{version}/models", models, access="user", docs=about_models) for version in ("/v1", "")),
        *(Entry(f"{version}/models/{{name:path}}", model, access="user", docs=about_one) for version in ("/v1", "")),
        Entry("/model_info", model_info, access="user", docs=about_model),
        Entry("/get_model_info", model_info, access="user", docs=about_model),
        Entry("/server_info", server_info, access="user", docs=about_server),
        Entry("/get_server_info", server_info, access="user", docs=about_server),
        Entry("/metrics", metrics, access="open", docs=Docs("Server", "For Prometheus.", answer="text/plain")),
        Entry("/version", version, access="user", docs=Docs("Server", "Its version.")),
    ]


def _control_routes(state: ServerState) -> list[Entry]:
    async def flush_cache(_: Request) -> Response:
        num_pages = await state.client.call("flush_cache")
        await asyncio.to_thread(trim)
        return PlainTextResponse(f"Cache flushed.\n{num_pages} pages were freed.\n")

    async def abort_request(request: Request) -> Response:
        payload = read_json(request.headers.get("content-type"), await request.body())
        refuse_unknown(payload, ("rid", "abort_all"))
        body = convert({name: value for name, value in payload.items() if value is not None}, AbortBody)
        if (body.rid is None) != body.abort_all:
            raise InvalidRequest("send either rid or abort_all: true", field="rid")
        refusal = call_of(request.scope).admin_refusal
        if body.abort_all and refusal is not None:
            raise refusal
        owner = None if refusal is None else client_name(request)
        return JSONResponse({"aborted": state.abort(body.rid, owner=owner)})

    return [
        Entry(
            "/flush_cache",
            flush_cache,
            access="admin",
            methods=["GET", "POST"],
            docs=Docs("Control", "Forget cached prefixes.", answer="text/plain"),
        ),
        Entry(
            "/abort_request",
            abort_request,
            access="user",
            methods=["POST"],
            any_model=True,
            is_limited=False,
            docs=Docs("Control", "End running requests.", bodies=(AbortBody,), example={"rid": "mine"}),
        ),
    ]


def model_card(state: ServerState, created: int) -> dict[str, Any]:
    """Returns the model's entry in OpenAI's `/v1/models`. `created`: seconds since the epoch."""
    info = state.context.info
    return {
        "id": info.model_name,
        "object": "model",
        "created": created,
        "owned_by": "tureen",
        "root": info.model_name,
        "parent": None,
        "max_model_len": state.context.capacity,
    }


def adapter_card(state: ServerState, created: int, name: str) -> dict[str, Any]:
    """Returns an adapter's entry in `/v1/models`; without its path, because every holder of a key may read it."""
    return model_card(state, created) | {"id": name, "root": name, "parent": state.context.info.model_name}


def model_facts(state: ServerState) -> dict[str, Any]:
    """Returns facts about the model, in the form of SGLang's `/get_model_info`."""
    info, config = state.context.info, state.context.config
    return {
        "model_path": info.model_path,
        "served_model_name": info.model_name,
        "tokenizer_path": config.tokenizer_path or info.model_path,
        "is_generation": info.pooling is None,
        "weight_version": config.weight_version,
        "model_type": info.model_type,
        "architectures": [info.architecture],
        "has_image_understanding": state.media is not None,
        "has_audio_understanding": False,
        "vocab_size": info.vocab_size,
        "context_length": info.context_len,
        "max_total_tokens": info.max_total_tokens,
        "eos_token_ids": list(info.eos_token_ids),
        "dtype": info.dtype,
        "activations": info.activations,
        "device": info.device,
    }


def server_facts(state: ServerState) -> dict[str, Any]:
    """Returns all settings, secret ones as null, and the engine's state, in the form of SGLang's `/get_server_info`."""
    config: dict[str, Any] = msgspec.to_builtins(state.context.config)
    info = state.context.info
    return (
        config
        | dict.fromkeys(secret_fields())
        | {
            "version": __version__,
            "max_total_num_tokens": info.max_total_tokens,
            "load_seconds": round(info.load_seconds, 3),
            "internal_states": [msgspec.structs.asdict(state.client.stats)],
        }
    )


def secret_fields() -> list[str]:
    """Returns the names of settings that are never shown."""
    fields = msgspec.structs.fields(Config)
    return [field.name for field in fields if get_args(field.type)[1].extra["secret"]]


def update_gauges(state: ServerState) -> None:
    """Copies the engine's statistics into the metrics that are read from them."""
    stats, info, metrics = state.client.stats, state.context.info, state.metrics
    engine = state.client.health
    metrics.set("engine_suspect", engine.state != "healthy")
    metrics.raise_to("engine_replacements", engine.num_replacements)
    metrics.raise_to("num_resumed_requests", engine.num_resumed)
    metrics.raise_to("num_poison_requests", engine.num_poison)
    used_pages = stats.num_pages - stats.num_free_pages - stats.num_cached_pages
    metrics.set("num_running_reqs", stats.num_running)
    metrics.set("num_queue_reqs", stats.num_queued)
    metrics.set("num_used_tokens", used_pages * info.page_size)
    metrics.set("token_usage", used_pages / stats.num_pages if stats.num_pages else 0.0)
    metrics.set("max_total_num_tokens", info.max_total_tokens)
    metrics.set("utilization", stats.num_running / info.max_running_requests)
    metrics.set("num_grammar_queue_reqs", stats.num_preparing)
    metrics.raise_to("forced_tokens", stats.total_forced_tokens)
    metrics.raise_to("num_grammar", stats.total_grammar_compiles + stats.total_grammar_hits)
    metrics.raise_to("num_grammar_cache_hit", stats.total_grammar_hits)
    metrics.raise_to("num_grammar_failed", stats.total_grammar_failures)
    metrics.raise_to("num_grammar_timeout", stats.total_grammar_timeouts)
    metrics.raise_to("num_grammar_unverified", state.helpers.num_unverified)
    metrics.raise_to("num_pictures", stats.total_pictures)
    metrics.raise_to("num_pictures_encoded", stats.total_pictures_encoded)
    metrics.raise_to("grammar_compile_seconds", stats.total_grammar_ms / 1000)
