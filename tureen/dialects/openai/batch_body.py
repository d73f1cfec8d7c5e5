"""Declares the fields of OpenAI's `/v1/batches`, and of an upload's expiry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tureen.fields.rules import read_tables

TABLE = read_tables(Path(__file__).with_name("fields.toml"))["batches"]

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]

Seconds = Annotated[int, Meta(ge=3600, le=2592000)]
"""A lifetime of a file."""


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that say when a file is removed."""

    seconds: Annotated[Seconds, Meta(description="Seconds until it is removed.")]
    anchor: Annotated[Literal["created_at"], Meta(description="From when they count.")] = "created_at"


class BatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/batches`."""

    input_file_id: Annotated[str, Meta(description="File of requests, one JSON object a line.")]
    endpoint: Annotated[Endpoint, Meta(description="The route of all its lines.")]
    completion_window: Annotated[
        str, Meta(description="Lines that have not run after this time are cancelled: 24h, 90m, 7d; at most 30d.")
    ]
    metadata: Annotated[
        Annotated[dict[str, str], Meta(max_length=16)] | None, Meta(description="Up to 16 of the client's own entries.")
    ] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Meta(description="When the files of answers are removed. Default: never.")
    ] = None


class BatchesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a list of batches."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None
