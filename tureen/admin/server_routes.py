"""Serves health, facts about model and server, metrics, and the operations that flush the cache and abort requests."""

from __future__ import annotations

import asyncio
import gc
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tureen import __version__
from tureen.admin.replica_routes import gauge_replica
from tureen.clients.quotas import Account, ClientWork, serving
from tureen.config_facts import secret_fields
from tureen.contract.params import SamplingParams
from tureen.contract.types import EngineHealth, KvDiskStats
from tureen.devices.cpu import trim
from tureen.errors import InvalidRequest, Unavailable
from tureen.fields.body import convert, read_json, refuse_unknown
from tureen.http.call import call_of
from tureen.http.dialect import Docs, Entry, client_name
from tureen.metrics import Metrics, Series, render
from tureen.requests.drafts import Options, one_prompt, plan_of
from tureen.requests.embedding import states_for, vector_of
from tureen.requests.generation import Run
from tureen.requests.planning import Names, Sampling
from tureen.requests.prompts import Prompt
from tureen.requests.state import ServerState

HEALTH_TIMEOUT_S = 20.0
WELL = ("healthy", "unloaded")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /abort_request`, of which one is sent."""

    rid: Annotated[str | None, Meta(description="Id of a request, a batch or a sample.")] = None
    abort_all: Annotated[bool, Meta(description="Abort all requests; needs the admin key.")] = False


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""
    freezing = Docs("Control", "Exclude all current objects from garbage collection.", answer="text/plain")
    freeze = Entry("/freeze_gc", _freeze_gc, access="admin", methods=["GET", "POST"], docs=freezing)
    return [*_health_routes(state), *_fact_routes(state), *_control_routes(state), freeze]


def _health_routes(state: ServerState) -> list[Entry]:
    def check() -> None:
        engine = state.client.health
        if state.common.models is not None:  # one that is lost harms no other
            engine = next((health for health in _healths(state) if health.state in WELL), engine)
        if engine.state not in WELL:
            raise Unavailable(
                f"the engine is {engine.state}: {engine.reason}",
                code="engine_dead" if engine.state == "down" else f"engine_{engine.state}",
                retry_after_s=engine.retry_after_s,
            )
        state.check_open()

    async def health(_: Request) -> Response:
        check()
        down = (*state.helpers_down, *_models_down(state))
        return PlainTextResponse(f"being replaced: {', '.join(down)}\n" if down else "")

    probing: asyncio.Task[None] | None = None

    async def health_generate(_: Request) -> Response:
        nonlocal probing
        check()
        if probing is None or probing.done():
            probing = asyncio.create_task(_generate_one(state))
            probing.add_done_callback(_retrieve)
        await asyncio.shield(probing)
        return PlainTextResponse("")

    return [
        Entry("/health", health, access="open", docs=Docs("Server", "Whether it is up.", answer="text/plain")),
        Entry("/ready", health, access="open", docs=Docs("Server", "The same as /health.", answer="text/plain")),
        Entry(
            "/health_scheduler",
            health,
            access="open",
            docs=Docs("Server", "The same, for SGLang's probes.", answer="text/plain"),
        ),
        Entry("/ping", health, access="open", docs=Docs("Server", "The same, for SageMaker.", answer="text/plain")),
        Entry(
            "/health_generate",
            health_generate,
            access="open",
            docs=Docs("Server", "Whether the server can generate a token.", answer="text/plain"),
        ),
    ]


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark the error of a task as seen: every client that asked may have left."""
    if not task.cancelled():
        task.exception()


async def _generate_one(state: ServerState) -> None:
    """Generate a token, as a client of its own that displaces no other. Raise TureenError."""
    if state.room.num_free < 1:
        raise state.room.refusal("so no token was generated")
    info = state.context.info
    is_generating = info.kind == "generator"
    sampling = Sampling(SamplingParams(max_new_tokens=int(is_generating), temperature=0.0), {}, Names())
    options = Options(hidden_states="none" if is_generating else states_for(None, info))
    prompt = Prompt([info.bos_token_id or 0])
    with serving(ClientWork(Account())):
        plan = plan_of(one_prompt(prompt, "prompt", sampling, options, log_metrics=False), state)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                [output] = await Run(state, plan).whole()
        except TimeoutError:
            raise Unavailable(f"no token within {HEALTH_TIMEOUT_S:.0f} s", code="engine_slow") from None
    if not is_generating:
        vector_of(output)


def _fact_routes(state: ServerState) -> list[Entry]:
    async def model_info(_: Request) -> Response:
        return JSONResponse(model_facts(state))

    async def server_info(_: Request) -> Response:
        return JSONResponse(server_facts(state))

    async def metrics(_: Request) -> Response:
        for each in state.common.states:
            update_gauges(each)
        sources: list[Series] = [each.metrics for each in state.common.states]
        if state.common.fronts is not None:
            sources = [await state.common.fronts.totals(state.metrics)]
        return Response(render(sources), media_type=METRICS_TYPE)

    async def version(_: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def weight_version(_: Request) -> Response:
        return JSONResponse({"weight_version": state.context.config.weight_version})

    about_model = Docs("Server", "Facts about the model.")
    about_server = Docs("Server", "Settings, no secrets, and the engine's state.")

    return [
        Entry("/model_info", model_info, access="user", docs=about_model),
        Entry("/get_model_info", model_info, access="user", docs=about_model),
        Entry("/server_info", server_info, access="user", docs=about_server),
        Entry("/get_server_info", server_info, access="user", docs=about_server),
        Entry("/get_weight_version", weight_version, access="user", docs=Docs("Server", "Version of the weights.")),
        Entry("/metrics", metrics, access="open", docs=Docs("Server", "For Prometheus.", answer="text/plain")),
        Entry("/version", version, access="user", docs=Docs("Server", "Its version.")),
    ]


async def _freeze_gc(_: Request) -> Response:
    gc.collect()
    gc.freeze()
    return PlainTextResponse("Garbage collection frozen.\n")


def _control_routes(state: ServerState) -> list[Entry]:
    async def flush_cache(request: Request) -> Response:
        num_pages = 0
        for each in chosen_states(request, state):
            num_pages += cast(int, await each.client.call("flush_cache"))
        await asyncio.to_thread(trim)
        return PlainTextResponse(f"Cache flushed.\n{num_pages} pages were freed.\n")

    async def abort_request(request: Request) -> Response:
        payload = read_json(request.headers.get("content-type"), await request.body())
        refuse_unknown(payload, ("rid", "abort_all"))
        sent = {
            name: value for name, value in payload.items() if value not in (None, "")
        }  # clients send rid "" for none
        body = convert(sent, AbortBody)
        if (body.rid is None) != body.abort_all:
            raise InvalidRequest("send either rid or abort_all: true", field="rid")
        refusal = call_of(request.scope).admin_refusal
        if body.abort_all and refusal is not None:
            raise refusal
        owner = None if refusal is None else client_name(request)
        count = state.common.abort(body.rid, owner=owner)
        if state.common.fronts is not None:
            count += await state.common.fronts.abort(body.rid, owner=owner)
        return JSONResponse({"aborted": count})

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
            docs=Docs("Control", "Abort running requests.", bodies=(AbortBody,), example={"rid": "mine"}),
        ),
    ]


def chosen_states(request: Request, state: ServerState) -> list[ServerState]:
    """Returns the models that a control operation is for: the one that the query names, else all that are loaded."""
    is_one = state.common.models is None or "model" in request.query_params
    return [state] if is_one else state.common.loaded


def _healths(state: ServerState) -> list[EngineHealth]:
    return [each.client.health for each in state.common.states]


def _models_down(state: ServerState) -> list[str]:
    """Returns the names of the models that cannot be used now, where there are several."""
    if state.common.models is None:
        return []
    return [each.context.info.model_name for each in state.common.states if each.client.health.state not in WELL]


def num_ranks(state: ServerState, *, with_replicas: bool = True) -> int:
    """Return how many ranks compute the model."""
    config = state.context.config
    replicas = max(1, len(state.client.replicas)) if with_replicas else 1
    return config.tensor_parallel_size * config.pipeline_parallel_size * replicas


def model_facts(state: ServerState) -> dict[str, Any]:
    """Returns facts about the model, in the form of SGLang's `/get_model_info`."""
    info, config = state.context.info, state.context.config
    return {
        "model_path": info.model_path,
        "served_model_name": info.model_name,
        "tokenizer_path": config.tokenizer_path or info.model_path,
        "is_generation": info.kind == "generator",
        "preferred_sampling_params": config.preferred_sampling_params,
        "weight_version": config.weight_version,
        "model_type": info.model_type,
        "architectures": [info.architecture],
        "has_image_understanding": state.media is not None,
        "has_audio_understanding": False,
        "vocab_size": info.vocab_size,
        "context_length": info.context_len,
        "rope_factors": info.rope_factors,
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
    stats = msgspec.structs.asdict(state.client.stats)
    if stats["kv_disk"] is not None:
        stats["kv_disk"] = msgspec.structs.asdict(stats["kv_disk"])
    return (
        config
        | dict.fromkeys(secret_fields())
        | {
            "version": __version__,
            "model_path": info.model_path,
            "served_model_name": info.model_name,
            "max_total_num_tokens": info.max_total_tokens,
            "load_seconds": round(info.load_seconds, 3),
            "world_size": num_ranks(state),
            "internal_states": [stats],
        }
    )


def update_gauges(state: ServerState) -> None:
    """Copies the engine's statistics into the metrics that are read from them."""
    for replica in state.client.replicas:
        gauge_replica(replica, state.metrics)
    stats, info, metrics = state.client.stats, state.context.info, state.metrics
    engine = state.client.health
    metrics.set("engine_suspect", engine.state not in WELL)
    metrics.raise_to("engine_replacements", engine.num_replacements)
    metrics.raise_to("num_resumed_requests", engine.num_resumed)
    metrics.raise_to("num_poison_requests", engine.num_poison)
    metrics.set("num_running_reqs", stats.num_running)
    metrics.set("num_queue_reqs", stats.num_queued)
    metrics.set("num_used_tokens", stats.num_used_pages * info.page_size)
    metrics.set("token_usage", stats.num_used_pages / max(1, stats.num_pages))
    metrics.set("swa_token_usage", stats.num_used_window_pages / max(1, stats.num_window_pages))
    metrics.set("max_total_num_tokens", info.max_total_tokens)
    metrics.set("utilization", stats.num_running / info.max_running_requests)
    metrics.set("num_grammar_queue_reqs", stats.num_preparing)
    metrics.raise_to("num_retracted_requests", stats.total_preemptions)
    metrics.raise_to("forced_tokens", stats.total_forced_tokens)
    metrics.raise_to("spec_draft_tokens", stats.total_guessed_tokens)
    metrics.raise_to("spec_accept_tokens", stats.total_right_guesses)
    metrics.set("spec_saved_seconds", stats.total_saved_s)
    if stats.total_guessed_tokens:
        num_drawn = stats.total_output_tokens - stats.total_forced_tokens
        metrics.set("spec_accept_length", num_drawn / max(1, num_drawn - stats.total_right_guesses))
    metrics.raise_to("num_grammar", stats.total_grammar_compiles + stats.total_grammar_hits)
    metrics.raise_to("num_grammar_cache_hit", stats.total_grammar_hits)
    metrics.raise_to("num_grammar_failed", stats.total_grammar_failures)
    metrics.raise_to("num_grammar_timeout", stats.total_grammar_timeouts)
    metrics.raise_to("num_grammar_unverified", state.helpers.num_unverified)
    metrics.raise_to("num_pictures", stats.total_pictures)
    metrics.raise_to("num_pictures_encoded", stats.total_pictures_encoded)
    metrics.raise_to("grammar_compile_seconds", stats.total_grammar_ms / 1000)
    if stats.kv_disk is not None:
        _gauge_disk(stats.kv_disk, metrics)


def _gauge_disk(disk: KvDiskStats, metrics: Metrics) -> None:
    metrics.set("kv_disk_bytes", disk.num_bytes)
    for name in ("saved", "loaded", "evicted", "lost", "damaged"):
        metrics.raise_to(f"kv_disk_{name}_pages", getattr(disk, f"total_{name}"))
    metrics.raise_to("kv_disk_failures", disk.total_failed)
