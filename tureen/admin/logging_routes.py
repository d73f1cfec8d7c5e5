"""Serves SGLang's `/configure_logging`: what this process logs, while it runs."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.errors import InvalidRequest
from tureen.http.dialect import Docs, Entry, read_body
from tureen.log import LOGGER_NAME
from tureen.requests.state import ServerState


class LoggingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /configure_logging`."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Meta(description="Lowest level that is logged from now on. An engine in its own process keeps its level."),
    ] = None
    log_requests: Annotated[
        bool | None, Meta(description="Not available: contents of requests are never logged; true is refused.")
    ] = None
    log_requests_level: Annotated[int | None, Meta(description="Not available, as log_requests.")] = None
    dump_requests_folder: Annotated[str | None, Meta(description="Not available, as log_requests.")] = None
    dump_requests_threshold: Annotated[int | None, Meta(description="Not available, as log_requests.")] = None


ABOUT_CONTENTS = ("log_requests", "log_requests_level", "dump_requests_folder", "dump_requests_threshold")


def routes(_: ServerState) -> list[Entry]:
    """Returns the routes: the level as it is, and a change of it."""

    async def configure_logging(request: Request) -> Response:
        body = await read_body(request, LoggingBody) if request.method == "POST" else LoggingBody()
        for field in ABOUT_CONTENTS:
            if getattr(body, field):
                raise InvalidRequest(
                    f"{field} is not available: contents of requests are never logged; send log_level",
                    field=field,
                    code="not_available",
                )
        logger = logging.getLogger(LOGGER_NAME)
        if body.log_level is not None:
            logger.setLevel(body.log_level.upper())
        return JSONResponse({"log_level": logging.getLevelName(logger.getEffectiveLevel()).lower()})

    path, shown = "/configure_logging", Docs("Control", "The level of logging.")
    docs = Docs("Control", "Change the level of logging.", bodies=(LoggingBody,), example={"log_level": "info"})
    return [
        Entry(path, configure_logging, access="admin", methods=["GET"], docs=shown),
        Entry(path, configure_logging, access="admin", methods=["POST"], docs=docs),
    ]
