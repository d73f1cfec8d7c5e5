"""Serves OpenAI's `/v1/batches`.

Source: https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tureen.batches.records import BatchRecord, Page, new_id
from tureen.batches.usage import TokensUsed
from tureen.dialects.openai.batch_body import TABLE, BatchBody, BatchesQuery
from tureen.dialects.openai.file_routes import json_answer, list_of, present, read_query
from tureen.errors import InvalidRequest, echo
from tureen.fields.body import convert, offered, read_json
from tureen.fields.ignored import ANSWER_FIELD, answer_field
from tureen.http.dialect import Docs, Entry, client_name
from tureen.requests.state import ServerState

if TYPE_CHECKING:
    from tureen.dialects.openai.batches import BatchService

WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def routes(state: ServerState, service: BatchService | None) -> list[Entry]:
    """Returns the routes. `service`: None where no batches are run; then they say so."""
    answers = BatchAnswers(state, service)
    path = "/v1/batches/{batch_id}"
    docs = Docs(
        "OpenAI",
        "Run a file of requests while the server is otherwise idle.",
        bodies=(BatchBody,),
        example={"input_file_id": "file-abc", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    )
    return [
        Entry("/v1/batches", answers.create, access="user", methods=["POST"], any_model=True, docs=docs),
        Entry(
            "/v1/batches", answers.batches, access="user", docs=Docs("OpenAI", "List the batches.", query=BatchesQuery)
        ),
        Entry(path, answers.batch, access="user", docs=Docs("OpenAI", "Describe a batch and its progress.")),
        Entry(
            f"{path}/cancel",
            answers.cancel,
            access="user",
            methods=["POST"],
            any_model=True,
            docs=Docs("OpenAI", "Cancel a batch; finished answers are kept."),
        ),
    ]


class BatchAnswers:
    """Answers requests about batches. Each raises InvalidRequest where none are run."""

    def __init__(self, state: ServerState, service: BatchService | None) -> None:
        self._state = state
        self._service = service

    async def create(self, request: Request) -> Response:
        service = present(self._service)
        self._state.check_open()
        payload = read_json(request.headers.get("content-type"), await request.body())
        body = convert(offered(payload, BatchBody.__struct_fields__, TABLE), BatchBody, table=TABLE)
        batch = batch_of(body, client_name(request), int(time.time()))
        file = await service.store.file(batch.client, batch.input_file_id, batch.created_at)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"input_file_id is a file of purpose {file.purpose}; upload the requests with purpose batch",
                field="input_file_id",
            )
        await service.store.add_batch(batch)
        service.runner.add(batch)
        return json_answer(shown(batch) | answer_field())

    async def batches(self, request: Request) -> Response:
        service, query = present(self._service), read_query(request, BatchesQuery)
        page = Page(query.limit, query.after)
        batches, has_more = await service.store.batches(client_name(request), page)
        return json_answer(list_of([shown(service.runner.current(batch)) for batch in batches], has_more))

    async def batch(self, request: Request) -> Response:
        return json_answer(shown(present(self._service).runner.current(await self._batch(request))))

    async def cancel(self, request: Request) -> Response:
        return json_answer(shown(await present(self._service).runner.cancel(await self._batch(request))))

    async def _batch(self, request: Request) -> BatchRecord:
        return await present(self._service).store.batch(client_name(request), request.path_params["batch_id"])


def batch_of(body: BatchBody, client: str, now_s: int) -> BatchRecord:
    """Makes the record of a new batch. Raises InvalidRequest."""
    _check_metadata(body.metadata or {})
    return BatchRecord(
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


def shown(batch: BatchRecord) -> dict[str, Any]:
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
        "usage": _usage(batch.usage),
        "metadata": batch.metadata,
        **({ANSWER_FIELD: [f"lines[].{name}" for name in batch.ignored]} if batch.ignored else {}),
    }


def _usage(usage: TokensUsed) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


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
