"""Serves SGLang's routes that change weights, give memory back and take it again, and tell the server's load."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen import __version__
from tureen.admin import group_routes, received_routes
from tureen.admin.weight_exchange import ExchangeOptions, NewSource, WeightExchange, abort_all, not_updated, success
from tureen.admin.weight_group import WeightGroups
from tureen.admin.weight_updates import WeightUpdates
from tureen.config import cache_dir
from tureen.contract.params import INT64_MAX, JsonObject
from tureen.devices.cpu import trim
from tureen.errors import ECHO_LIMIT, InvalidRequest, NotFound, StartupError, echo
from tureen.fetching.names import WHAT_IS_TAKEN
from tureen.fields.body import refuse_unknown
from tureen.http.dialect import Docs, Entry, read_body, unless_gone
from tureen.log import get_logger
from tureen.requests.state import ServerState
from tureen.serving.dry_run import dry_run
from tureen.text.tokenizer import Tokenizer
from tureen.weights.source import ModelSource, load_tokenizer, resolve_model

TAGS = ("kv_cache", "weights")
SECTIONS = ("core", "memory", "queues")
ABSENT_SECTIONS = ("disagg", "lora", "spec")
"""Sections of SGLang's `/v1/loads` that gateways ask for and that there is nothing to say about."""

GIB = 1 << 30

log = get_logger("api")


class UpdateBody(ExchangeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /update_weights_from_disk`."""

    model_path: Annotated[str, Meta(min_length=1, description="The model with the new weights, as for --model-path.")]
    load_format: Annotated[
        Literal["auto", "dummy"] | None, Meta(description="As for --load-format. Default: the server's.")
    ] = None
    flush_cache: Annotated[bool, Meta(description="Must be true: the cache of the old weights is dropped.")] = True
    is_async: Annotated[bool, Meta(description="Must be false: the answer is sent when the weights are loaded.")] = (
        False
    )
    recapture_cuda_graph: Annotated[bool, Meta(description="Must be false: there are no CUDA graphs.")] = False
    token_step: Annotated[int, Meta(description="Must be 0: use weight_version.")] = 0
    manifest: Annotated[JsonObject | None, Meta(description="Must be null.")] = None


class VersionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /update_weight_version`."""

    new_version: Annotated[str, Meta(max_length=256, description="Version that answers report from then on.")]
    abort_all_requests: Annotated[bool, Meta(description="Abort all requests first.")] = True


class WeightBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /get_weights_by_name`."""

    name: Annotated[str, Meta(description="Name in the checkpoint, such as model.layers.0.self_attn.q_proj.weight.")]
    truncate_size: Annotated[
        int, Meta(ge=1, le=INT64_MAX, description="Number of rows to return, from the first on.")
    ] = 100


class MemoryBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Annotated[
        Annotated[list[Literal["kv_cache", "weights"]], Meta(min_length=1, max_length=16)] | None,
        Meta(description="Parts of the memory. Default: all."),
    ] = None


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""
    exchange = WeightExchange(state)
    updates = WeightUpdates(state, exchange)
    groups = WeightGroups()
    state.lifecycle.services += [updates, groups]
    return [
        *_load_routes(state),
        *_update_routes(state, exchange),
        *received_routes.routes(updates),
        *group_routes.routes(state, updates, groups),
        *_weight_routes(state),
        *_memory_routes(state),
    ]


def _load_routes(state: ServerState) -> list[Entry]:
    async def loads(request: Request) -> Response:
        sections = _sections(dict(request.query_params))
        return JSONResponse(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "dp_rank_count": 1,
                "loads": [_load(state, sections)],
            }
        )

    async def load(_: Request) -> Response:
        core = _load(state, {"core"})
        return JSONResponse(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": core["num_total_reqs"],
                    "num_waiting_reqs": core["num_waiting_reqs"],
                    "num_tokens": core["num_used_tokens"],
                }
            ]
        )

    return [
        Entry("/v1/loads", loads, access="user", docs=Docs("SGLang", "The load of each replica.")),
        Entry("/get_load", load, access="user", docs=Docs("SGLang", "The load in the form of older routers.")),
    ]


def _update_routes(state: ServerState, exchange: WeightExchange) -> list[Entry]:
    async def update(request: Request) -> Response:
        body = await read_body(request, UpdateBody)
        _refuse(body, state)
        if state.context.info.kind != "generator":
            raise NotFound("embedding and scoring models keep their weights; restart the server with the new ones")
        source = await asyncio.to_thread(_find, body.model_path, state)
        new = NewSource(source=source, load_format=body.load_format, model_path=body.model_path)
        await dry_run("update_weights", new.place(), state.context.config)
        await asyncio.to_thread(_check_tokenizer, source, body.model_path, state)

        async def prepare() -> NewSource:
            return new

        num_paused = await unless_gone(request, exchange.run(prepare, body))
        return JSONResponse(success(num_paused, body, state))

    updating = Docs("Control", "Replace the weights.", (UpdateBody,), {"model_path": "checkpoints/step-200"})
    return [
        Entry(path, update, access="admin", methods=["POST"], docs=updating, render_error=not_updated)
        for path in ("/update_weights_from_disk", "/update_weights")
    ]


def _weight_routes(state: ServerState) -> list[Entry]:
    async def update_version(request: Request) -> Response:
        body = await read_body(request, VersionBody)
        if body.abort_all_requests:
            abort_all(state)
        state.serve_weights(version=body.new_version)
        message = f"Weight version updated to {body.new_version}"
        return JSONResponse({"success": True, "message": message, "new_version": body.new_version})

    async def weight(request: Request) -> Response:
        body = await read_body(request, WeightBody)
        values = await state.client.call("weight", name=body.name, truncate_size=body.truncate_size)
        return Response(await asyncio.to_thread(msgspec.json.encode, values), media_type="application/json")

    naming = Docs("Control", "Name the weights.", (VersionBody,), {"new_version": "step-200"})
    looking = Docs("Control", "Read a weight.", (WeightBody,), {"name": "model.norm.weight", "truncate_size": 4})
    return [
        Entry(
            "/update_weight_version",
            update_version,
            access="admin",
            methods=["POST"],
            docs=naming,
            render_error=not_updated,
        ),
        Entry("/get_weights_by_name", weight, access="admin", methods=["GET", "POST"], docs=looking),
    ]


class NoSuchModel(InvalidRequest):
    """The model of an update cannot be found, or cannot be fetched."""

    def __init__(self, model_path: str) -> None:
        super().__init__(
            f"model_path {echo(model_path)}: there is no such model, or it cannot be fetched; give {WHAT_IS_TAKEN}; "
            "the server's log says more",
            field="model_path",
        )
        self.summary = f"Failed to get weights iterator: {model_path[:ECHO_LIMIT]} (repository not found)."


def _memory_routes(state: ServerState) -> list[Entry]:
    async def change(request: Request, op: str) -> Response:
        tags = (await read_body(request, MemoryBody)).tags or TAGS
        await state.client.call(op, tags=list(dict.fromkeys(tags)))
        return JSONResponse({"success": True, "tags": sorted(set(tags))})

    async def release(request: Request) -> Response:
        answer = await change(request, "release_memory")
        await asyncio.to_thread(trim)
        return answer

    async def resume(request: Request) -> Response:
        return await change(request, "resume_memory")

    def entry(path: str, endpoint: Any, summary: str) -> Entry:
        docs = Docs("Control", summary, bodies=(MemoryBody,), example={"tags": ["kv_cache"]})
        return Entry(path, endpoint, access="admin", methods=["GET", "POST"], docs=docs)

    return [
        entry("/release_memory_occupation", release, "Release memory."),
        entry("/resume_memory_occupation", resume, "Take the memory again."),
    ]


def _refuse(body: UpdateBody, state: ServerState) -> None:
    """Raises InvalidRequest for options that are not available here."""
    wrong = {
        "flush_cache": (not body.flush_cache, "the KV cache of the old weights would be used with the new ones"),
        "is_async": (body.is_async, "the answer is sent when the weights are loaded"),
        "recapture_cuda_graph": (body.recapture_cuda_graph, "there are no CUDA graphs"),
        "token_step": (body.token_step != 0, "name the weights by weight_version"),
        "manifest": (body.manifest is not None, "all of the model's weights are always read"),
    }
    for name, (is_wrong, reason) in wrong.items():
        if is_wrong:
            raise InvalidRequest(f"{name} is not available: {reason}; leave it out", field=name)
    body.check(state)


def _find(model_path: str, state: ServerState) -> ModelSource:
    """Finds or fetches a model. Raises InvalidRequest."""
    try:
        return resolve_model(model_path, cache_dir=cache_dir(state.context.config))
    except (StartupError, OSError, ValueError) as error:  # ValueError: for a path that no file can have
        log.warning("the weights were not replaced: %s", error)
        raise NoSuchModel(model_path) from None


def _check_tokenizer(source: ModelSource, model_path: str, state: ServerState) -> None:
    """Raises InvalidRequest for a model whose vocabulary is not that of the model served."""
    has_tokenizer = source.format == "gguf" or (source.path / "tokenizer.json").exists()
    if state.context.config.tokenizer_path is not None or not has_tokenizer:  # the server keeps its tokenizer
        return
    try:
        other = load_tokenizer(source)
    except StartupError as error:
        log.warning("the weights were not replaced: %s", error.message)
        raise InvalidRequest(
            f"model_path {echo(model_path)}: its tokenizer cannot be read; the server's log says why",
            field="model_path",
        ) from None
    if not _are_alike(state.context.tokenizer, other):
        raise InvalidRequest(
            f"model_path {echo(model_path)}: its vocabulary or special tokens differ from the served model's; restart "
            "the server with it",
            field="model_path",
        )


def _are_alike(served: Tokenizer, loaded: Tokenizer) -> bool:
    """Returns whether each token id means the same to both tokenizers."""
    facts = [(each.vocab_size, each.special_ids, each.eos_token_ids, each.bos_token_id) for each in (served, loaded)]
    return facts[0] == facts[1] and all(
        served.token_bytes(token_id) == loaded.token_bytes(token_id) for token_id in range(served.vocab_size)
    )


def _sections(query: dict[str, str]) -> set[str]:
    """Returns the sections that a query of `/v1/loads` asks for. Raises InvalidRequest."""
    refuse_unknown(query, ("include", "dp_rank", "format"))
    if query.get("dp_rank", "0") != "0":
        raise InvalidRequest(f"dp_rank must be 0, the only replica, got {echo(query['dp_rank'])}", field="dp_rank")
    if query.get("format", "json") != "json":
        raise InvalidRequest(
            f"format must be json, got {echo(query['format'])}; Prometheus reads /metrics", field="format"
        )
    asked = {section.strip() for section in query.get("include", "all").split(",")}
    unknown = sorted(asked - {*SECTIONS, *ABSENT_SECTIONS, "all"})
    if unknown:
        raise InvalidRequest(
            f"include: must be some of {', '.join(SECTIONS)}, all; got {echo(unknown[0])}", field="include"
        )
    return set(SECTIONS) if "all" in asked else asked & set(SECTIONS)


def _load(state: ServerState, sections: set[str]) -> dict[str, Any]:
    """Returns the load of the only replica, under SGLang's names."""
    stats, info, engine = state.client.stats, state.context.info, state.client.health
    used = stats.num_used_pages
    num_waiting = stats.num_queued + stats.num_preparing
    load: dict[str, Any] = {"dp_rank": 0}
    if "core" in sections:
        load |= {
            "num_running_reqs": stats.num_running,
            "num_waiting_reqs": num_waiting,
            "num_total_reqs": stats.num_running + num_waiting,
            "num_used_tokens": used * info.page_size,
            "max_total_num_tokens": info.max_total_tokens,
            "token_usage": used / stats.num_pages if stats.num_pages else 0.0,
            "gen_throughput": state.metrics.level("gen_throughput"),
            "cache_hit_rate": state.metrics.level("cache_hit_rate"),
            "utilization": stats.num_running / info.max_running_requests,
            "max_running_requests": info.max_running_requests,
            "engine": {"state": engine.state, "reason": engine.reason},
        }
    if "memory" in sections:
        num_bytes = info.max_total_tokens * info.kv_bytes_per_token
        load["memory"] = {"kv_cache_gb": round(num_bytes / GIB, 3), "token_capacity": info.max_total_tokens}
    if "queues" in sections:
        paused = stats.num_running if stats.is_paused else 0
        load["queues"] = {"waiting": stats.num_queued, "grammar": stats.num_preparing, "paused": paused}
    return load
