"""Serves OpenAI's `/v1/batches`.

Source: https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tureen.batches.records import Batch, new_id
from tureen.dialects.openai.file_routes import NOT_HERE, json_answer, list_of, read_query
from tureen.errors import InvalidRequest, echo
from tureen.http.dialect import Docs, Entry, client_name, read_body
from tureen.requests.state import ServerState

if TYPE_CHECKING:
    from tureen.dialects.openai.batches import BatchService

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]

MAX_LISTED, DEFAULT_LISTED = 100, 20
WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

Seconds = Annotated[int, Meta(ge=3600, le=2592000)]


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a file is removed."""

    seconds: Annotated[Seconds, Meta(description="Seconds until it is removed.")]
    anchor: Annotated[Literal["created_at"], Meta(description="From when they count.")] = "created_at"


class BatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/batches`."""

    input_file_id: Annotated[str, Meta(description="File of requests, one JSON object a line.")]
    endpoint: Annotated[Endpoint, Meta(description="The route that all its lines ask.")]
    completion_window: Annotated[
        str, Meta(description="Time after which lines that have not run never will: 24h, 90m, 7d; at most 30d.")
    ]
    metadata: Annotated[dict[str, str] | None, Meta(description="Up to 16 notes of the client's own.")] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Meta(description="When the files of answers are removed. Default: never.")
    ] = None


class BatchesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a list of batches."""

    limit: int = DEFAULT_LISTED
    after: str | None = None


def routes(state: ServerState, service: BatchService | None) -> list[Entry]:
    """Returns the routes. `service`: None where no batches are run; then they say so."""

    def present() -> BatchService:
        if service is None:
            raise NOT_HERE
        return service

    async def create(request: Request) -> Response:
        batches = present()
        state.check_open()
        body = await read_body(request, BatchBody)
        batch = batch_of(body, client_name(request), int(time.time()))
        file = await batches.store.file(batch.client, batch.input_file_id, batch.created_at)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"input_file_id is a file of purpose {file.purpose}; upload the requests with purpose batch",
                field="input_file_id",
            )
        await batches.store.add_batch(batch)
        batches.runner.add(batch)
        return json_answer(shown(batch))

    async def listed(request: Request) -> Response:
        query = read_query(request, BatchesQuery)
        page = present().page(query.limit, MAX_LISTED, query.after)
        batches, has_more = await present().store.batches(client_name(request), page)
        return json_answer(list_of([shown(present().runner.current(batch)) for batch in batches], has_more))

    async def one(request: Request) -> Response:
        return json_answer(shown(present().runner.current(await _batch(request, present()))))

    async def cancel(request: Request) -> Response:
        return json_answer(shown(await present().runner.cancel(await _batch(request, present()))))

    path = "/v1/batches/{batch_id}"
    docs = Docs(
        "OpenAI",
        "Run a file of requests when nobody else asks for anything.",
        bodies=(BatchBody,),
        example={"input_file_id": "file-abc", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    )
    return [
        Entry("/v1/batches", create, access="user", methods=["POST"], any_model=True, docs=docs),
        Entry("/v1/batches", listed, access="user", docs=Docs("OpenAI", "List the batches.")),
        Entry(path, one, access="user", docs=Docs("OpenAI", "Describe a batch: how far it is.")),
        Entry(
            f"{path}/cancel",
            cancel,
            access="user",
            methods=["POST"],
            any_model=True,
            docs=Docs("OpenAI", "Cancel a batch; what is answered stays."),
        ),
    ]


def batch_of(body: BatchBody, client: str, now_s: int) -> Batch:
    """Makes the record of a new batch. Raises InvalidRequest."""
    _check_metadata(body.metadata or {})
    return Batch(
        id=new_id("batch_"),
        client=client,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now_s,
        expires_at=now_s + window_s(body.completion_window),
        metadata=body.metadata,
        output_expires_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )


def window_s(window: str) -> int:
    """Returns the seconds of a completion window. Raises InvalidRequest."""
    match = WINDOW.fullmatch(window)
    seconds = 0 if match is None else int(match[1]) * SECONDS[match[2]]
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequest(
            f"completion_window must be a number and s, m, h or d, such as 24h, and at most 30d; got {echo(window)}",
            field="completion_window",
        )
    return seconds


def shown(batch: Batch) -> dict[str, Any]:
    """Returns a batch as OpenAI shows it."""
    faults = [msgspec.structs.asdict(fault) for fault in batch.faults]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{status}_at": batch.times.get(status) for status in TIMES},
        "request_counts": msgspec.structs.asdict(batch.counts),
        "metadata": batch.metadata,
    }


async def _batch(request: Request, service: BatchService) -> Batch:
    return await service.store.batch(client_name(request), request.path_params["batch_id"])


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises InvalidRequest for more notes than OpenAI takes, or longer ones."""
    if len(metadata) > MAX_PAIRS:
        raise InvalidRequest(f"metadata takes at most {MAX_PAIRS} entries, got {len(metadata)}", field="metadata")
    for name, value in metadata.items():
        if len(name) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise InvalidRequest(
                f"metadata: a name has at most {MAX_KEY_CHARS} characters and a value {MAX_VALUE_CHARS}; "
                f"{echo(name)} has more",
                field="metadata",
            )
