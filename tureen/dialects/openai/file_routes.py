"""Serves OpenAI's `/v1/files`: what batches read and write.

Source: https://platform.openai.com/docs/api-reference/files
"""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.batches.records import MAX_FILE_BYTES, MAX_FILES, Page, StoredFile
from tureen.errors import InvalidRequest, NotFound
from tureen.fields.body import convert, refuse_unknown
from tureen.files import NotRegular
from tureen.http.call import call_of
from tureen.http.dialect import Docs, Entry, client_name
from tureen.http.sse import StreamedResponse

if TYPE_CHECKING:
    from tureen.dialects.openai.batches import BatchService

Q = TypeVar("Q", bound=msgspec.Struct)

FORM_BYTES = 64 << 10
"""Bytes that a form may have besides its file."""
PIECE_BYTES = 64 << 10

NOT_HERE = InvalidRequest(
    "this server keeps no files and runs no batches; start it with --batch-path PATH", code="not_available"
)


class UploadEntry(Entry):
    """A route whose body is a file."""

    max_body_bytes = MAX_FILE_BYTES + FORM_BYTES


class UploadForm(msgspec.Struct, frozen=True):
    """The fields of an upload's form. batches.py reads them."""

    file: Annotated[bytes, Meta(description="The requests, one JSON object a line.")]
    purpose: Annotated[Literal["batch"], Meta(description="What the file is for.")]


class FilesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a list of files."""

    limit: Annotated[int, Meta(ge=1, le=MAX_FILES)] = MAX_FILES
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def routes(service: BatchService | None) -> list[Entry]:
    """Returns the routes. `service`: None where nothing is kept; then they say so."""
    answers = FileAnswers(service)
    path = "/v1/files/{file_id}"
    docs = Docs("OpenAI", "Download a file.", answer="application/octet-stream")
    return [
        UploadEntry(
            "/v1/files",
            answers.upload,
            access="user",
            methods=["POST"],
            any_model=True,
            is_limited=False,  # nothing runs; how much a client may keep has a limit of its own
            docs=Docs("OpenAI", "Upload requests.", form=UploadForm, example={"file": "", "purpose": "batch"}),
        ),
        Entry("/v1/files", answers.files, access="user", docs=Docs("OpenAI", "List the files.", query=FilesQuery)),
        Entry(path, answers.file, access="user", docs=Docs("OpenAI", "Describe a file.")),
        Entry(path, answers.delete, access="user", methods=["DELETE"], docs=Docs("OpenAI", "Delete a file.")),
        Entry(f"{path}/content", answers.content, access="user", docs=docs),
    ]


class FileAnswers:
    """Answers requests about files. Each raises InvalidRequest where none are kept."""

    def __init__(self, service: BatchService | None) -> None:
        self._service = service

    async def upload(self, request: Request) -> Response:
        file, told = await present(self._service).receive(request), call_of(request.scope).telling
        return json_answer(shown(file), {"x-tureen-ignored": told.header().decode()} if told.paths else None)

    async def files(self, request: Request) -> Response:
        service, query = present(self._service), read_query(request, FilesQuery)
        page = Page(query.limit, query.after, query.order == "asc", query.purpose)
        files, has_more = await service.store.files(client_name(request), page, int(time.time()))
        return json_answer(list_of([shown(file) for file in files], has_more))

    async def file(self, request: Request) -> Response:
        return json_answer(shown(await self._file(request)))

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await present(self._service).store.delete_file(client_name(request), file_id, int(time.time()))
        return json_answer({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> ASGIApp:
        file = await self._file(request)
        try:
            opened = await asyncio.to_thread(present(self._service).store.contents.read, file.id)
        except (FileNotFoundError, NotRegular):
            raise NotFound("the file's content is gone", field="file_id", code="file_not_found") from None
        return _content(opened, file.num_bytes)

    async def _file(self, request: Request) -> StoredFile:
        store = present(self._service).store
        return await store.file(client_name(request), request.path_params["file_id"], int(time.time()))


def present(service: BatchService | None) -> BatchService:
    """Returns the service. Raises InvalidRequest where there is none."""
    if service is None:
        raise NOT_HERE
    return service


def json_answer(content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Returns an answer in JSON."""
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")


def list_of(objects: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Returns OpenAI's list of objects."""
    ids = [shown["id"] for shown in objects] or [None]
    return {"object": "list", "data": objects, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}


def shown(file: StoredFile) -> dict[str, Any]:
    """Returns a file as OpenAI shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def read_query(request: Request, kind: type[Q]) -> Q:
    """Reads the query of a URL as `kind`. Raises InvalidRequest."""
    sent: dict[str, Any] = {name: value for name, value in request.query_params.items() if value}
    refuse_unknown(sent, kind.__struct_fields__)
    limit = sent.get("limit", "")
    return convert(sent | ({"limit": int(limit)} if re.fullmatch("[0-9]{1,9}", limit) else {}), kind)


def _content(file: io.BufferedReader, num_bytes: int) -> StreamedResponse:
    """Sends as many bytes of a file as it had when it was looked up."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        left = num_bytes
        try:
            while left and (piece := await asyncio.to_thread(file.read, min(left, PIECE_BYTES))):
                left -= len(piece)
                yield piece
        finally:
            file.close()

    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(num_bytes).encode())]
    return StreamedResponse({"type": "http.response.start", "status": 200, "headers": headers}, pieces())
