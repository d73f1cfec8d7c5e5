"""Serves the routes by which a trainer broadcasts weights in a process group: SGLang's, and vLLM's over gloo."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.admin.received_routes import Cached, admin_entry
from tureen.admin.server_routes import num_ranks
from tureen.admin.weight_exchange import ExchangeOptions, group_failed
from tureen.admin.weight_group import Membership, WeightGroups
from tureen.admin.weight_updates import WeightUpdates
from tureen.errors import InvalidRequest, echo
from tureen.http.dialect import Docs, Entry, read_body
from tureen.requests.state import ServerState
from tureen.runner.received import Announced

GROUP = "weight_update_group"
"""SGLang's default name of a group."""
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float": "F32", "half": "F16"}
"""torch's names of types -> those of safetensors files."""
FLATTENED = "flattened_bucket"
EXAMPLE = {
    "master_address": "127.0.0.1",
    "master_port": 29500,
    "rank_offset": 1,
    "world_size": 2,
    "backend": "gloo",
}

Name = Annotated[str, Meta(min_length=1, max_length=256, description="Name of the group.")]
Word = Annotated[str, Meta(max_length=64)]
TensorName = Annotated[str, Meta(max_length=512)]
Names = Annotated[list[TensorName], Meta(min_length=1, max_length=1 << 18)]
Shape = Annotated[list[Annotated[int, Meta(ge=0, le=1 << 40)]], Meta(max_length=8)]
Shapes = Annotated[list[Shape], Meta(min_length=1, max_length=1 << 18)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Rank = Annotated[int, Meta(ge=0, le=1 << 20)]


class GroupBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /init_weights_update_group`."""

    master_address: Annotated[str, Meta(min_length=1, max_length=256, description="The trainer's address.")]
    master_port: Annotated[Port | str, Meta(description="The trainer's port.")]
    rank_offset: Annotated[Rank, Meta(description="The group's rank of this server's first rank; the trainer has 0.")]
    world_size: Annotated[Rank, Meta(description="Ranks of the group: trainer and servers.")]
    group_name: Name = GROUP
    backend: Annotated[str, Meta(max_length=64, description="Must be gloo.")] = "nccl"


class GroupName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /destroy_weights_update_group`."""

    group_name: Name = GROUP


class BroadcastBody(ExchangeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /update_weights_from_distributed`."""

    names: Annotated[Names | None, Meta(description="The tensors, in the order in which they are broadcast.")] = None
    dtypes: Annotated[Names | None, Meta(description="Their types, such as bfloat16.")] = None
    shapes: Annotated[Shapes | None, Meta(description="Their shapes.")] = None
    name: Annotated[TensorName | None, Meta(description="One tensor, as older clients send it.")] = None
    dtype: Annotated[Word | None, Meta(description="Its type.")] = None
    shape: Annotated[Shape | None, Meta(description="Its shape.")] = None
    group_name: Name = GROUP
    load_format: Annotated[Word | None, Meta(description="flattened_bucket: all tensors are broadcast as one.")] = None
    flush_cache: Cached = True


class InitInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The field `init_info` of vLLM's clients."""

    master_address: Annotated[str, Meta(min_length=1, max_length=256)]
    master_port: Port
    rank_offset: Rank
    world_size: Rank
    backend: Annotated[str, Meta(max_length=64)] = "nccl"


class InitBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /init_weight_transfer_engine`."""

    init_info: Annotated[InitInfo, Meta(description="The trainer's group. Its backend must be gloo.")]


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The field `update_info` of vLLM's clients."""

    names: Names
    dtype_names: Names
    shapes: Shapes
    packed: bool = False


class UpdateInfoBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's `POST /update_weights`."""

    update_info: Annotated[UpdateInfo, Meta(description="The tensors, in the order in which they are broadcast.")]


class UpdateInfoEntry(Entry):
    """vLLM's bodies on a path that SGLang's older clients use, too."""

    fields = ("update_info",)


def routes(state: ServerState, updates: WeightUpdates, groups: WeightGroups) -> list[Entry]:
    """Return the routes."""
    return [*_group_routes(state, updates, groups), *_broadcast_routes(updates, groups)]


def _group_routes(state: ServerState, updates: WeightUpdates, groups: WeightGroups) -> list[Entry]:
    async def join(info: GroupBody | InitInfo, name: str, *, with_replicas: bool) -> None:
        updates.check_possible()
        membership = Membership(
            name=name,
            backend=info.backend,
            address=info.master_address,
            port=_port(info.master_port),
            first_rank=info.rank_offset,
            num_ranks=num_ranks(state, with_replicas=with_replicas),
            world_size=info.world_size,
        )
        await groups.join(membership)

    async def init(request: Request) -> Response:
        body = await read_body(request, GroupBody)
        await join(body, body.group_name, with_replicas=False)
        return JSONResponse({"success": True, "message": "Succeeded to initialize custom process group."})

    async def init_transfer(request: Request) -> Response:
        body = await read_body(request, InitBody)
        await join(body.init_info, GROUP, with_replicas=True)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def destroy(request: Request) -> Response:
        name = (await read_body(request, GroupName)).group_name
        groups.find(name)
        groups.leave(name)
        return JSONResponse({"success": True, "message": "Succeeded to destroy custom process group."})

    joining = Docs("Control", "Join a trainer's process group.", (GroupBody,), EXAMPLE)
    transfer = Docs("Control", "The same for vLLM's clients.", (InitBody,), {"init_info": EXAMPLE})
    leaving = Docs("Control", "Leave a trainer's process group.", (GroupName,), {"group_name": GROUP})
    return [
        admin_entry("/init_weights_update_group", init, joining, group_failed),
        admin_entry("/init_weight_transfer_engine", init_transfer, transfer, group_failed),
        admin_entry("/destroy_weights_update_group", destroy, leaving, group_failed),
    ]


def _broadcast_routes(updates: WeightUpdates, groups: WeightGroups) -> list[Entry]:
    async def take(tensors: list[Announced], group_name: str, options: ExchangeOptions, *, as_one: bool) -> Response:
        group = groups.find(group_name)
        sizes = [tensor.num_bytes for tensor in tensors]
        async with group.turn, updates.part(options, is_partial=True) as part:
            await part.fill(tensors, partial(group.receive, [sum(sizes)] if as_one else sizes))
        return JSONResponse(updates.arrived(part, options))

    async def distributed(request: Request) -> Response:
        with groups.left_at_fault():
            body = await read_body(request, BroadcastBody)
            if body.load_format not in (None, "auto", FLATTENED):
                raise InvalidRequest(
                    f"load_format must be {FLATTENED}, or left out, got {echo(body.load_format)}", field="load_format"
                )
            tensors = _announced(*_lists_of(body), field="dtypes")
            return await take(tensors, body.group_name, body, as_one=body.load_format == FLATTENED)

    async def update(request: Request) -> Response:
        with groups.left_at_fault():
            info = (await read_body(request, UpdateInfoBody)).update_info
            if info.packed:
                raise InvalidRequest(
                    "update_info.packed is not available: packed buffers are NCCL's; broadcast the tensors one by one",
                    field="update_info.packed",
                )
            tensors = _announced(info.names, info.dtype_names, info.shapes, field="update_info.dtype_names")
            return await take(tensors, GROUP, ExchangeOptions(), as_one=False)

    tensor = {"names": ["model.norm.weight"], "shapes": [[64]]}
    docs = Docs(
        "Control", "Take weights that a trainer broadcasts.", (BroadcastBody,), {**tensor, "dtypes": ["bfloat16"]}
    )
    info = {"update_info": {**tensor, "dtype_names": ["bfloat16"]}}
    others = Docs("Control", "The same for vLLM's clients.", (UpdateInfoBody,), info)
    return [
        admin_entry("/update_weights_from_distributed", distributed, docs),
        UpdateInfoEntry("/update_weights", update, access="admin", methods=["POST"], docs=others),
    ]


def _port(value: int | str) -> int:
    """Return a port; some clients send it as text. Raise InvalidRequest."""
    if isinstance(value, str) and value.isdigit() and 1 <= int(value[:6]) <= 65535:
        return int(value)
    if isinstance(value, int):
        return value
    raise InvalidRequest(f"master_port must be from 1 to 65535, got {echo(value)}", field="master_port")


def _lists_of(body: BroadcastBody) -> tuple[list[str], list[str], list[list[int]]]:
    """Return names, types and shapes, of one tensor too. Raise InvalidRequest."""
    lists, single = (body.names, body.dtypes, body.shapes), (body.name, body.dtype, body.shape)
    if all(field is not None for field in single) and lists == (None, None, None):
        return [body.name or ""], [body.dtype or ""], [body.shape or []]
    if body.names is None or body.dtypes is None or body.shapes is None or single != (None, None, None):
        raise InvalidRequest("names, dtypes and shapes are required", field="names")
    return body.names, body.dtypes, body.shapes


def _announced(names: list[str], dtypes: list[str], shapes: list[list[int]], *, field: str) -> list[Announced]:
    """Return the tensors that will be broadcast. Raise InvalidRequest."""
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest(
            f"names, types and shapes must be as many: got {len(names)}, {len(dtypes)} and {len(shapes)}", field=field
        )
    types = [dtype.removeprefix("torch.") for dtype in dtypes]
    unknown = [dtype for dtype in types if dtype not in DTYPES]
    if unknown:
        raise InvalidRequest(
            f"{field}: {echo(unknown[0])} is not taken; {', '.join(list(DTYPES)[:3])} are", field=field
        )
    return [Announced(*each) for each in zip(names, [DTYPES[each] for each in types], map(tuple, shapes), strict=True)]
