"""Traces requests if --otlp-endpoint or OpenTelemetry's own variables ask for it; imported only then.

Specification: https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from starlette.middleware import Middleware

from tureen.config import Config
from tureen.errors import StartupError, echo
from tureen.extras import require
from tureen.log import get_logger
from tureen.requests.state import Lifecycle

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

log = get_logger("http")


def check_tracing(config: Config) -> None:
    """Raises StartupError if --otlp-endpoint cannot be used. If OpenTelemetry's variables cannot, which are often meant
    for all programs of a machine, logs a warning."""
    if config.otlp_endpoint is None:
        if reason := _hindrance("OTEL_EXPORTER_OTLP_ENDPOINT"):
            log.warning("traces are not sent: %s", reason)
        return
    address = urlsplit(config.otlp_endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise StartupError(
            f"--otlp-endpoint {echo(config.otlp_endpoint)}: must be the address of a collector, such as "
            "http://127.0.0.1:4318",
            field="otlp_endpoint",
        )
    if reason := _hindrance("--otlp-endpoint"):
        raise StartupError(reason, field="otlp_endpoint")


def traces(config: Config, lifecycle: Lifecycle) -> list[Middleware]:
    """Returns the middleware that traces requests, and ends it with the server; [] if tracing is not possible."""
    if _hindrance("--otlp-endpoint"):
        return []
    from tureen.http.spans import Traced, Traces  # noqa: PLC0415 - it may not be installed

    service = Traces(config.otlp_endpoint)
    lifecycle.services.append(service)
    return [Middleware(Traced, traces=service)]


def _hindrance(asked_by: str) -> str:
    """Returns why traces cannot be sent; "" if they can."""
    variable = next((name for name in PROTOCOLS if os.environ.get(name)), "")
    if variable and os.environ[variable] != PROTOCOL:
        return f"{variable} is {echo(os.environ[variable])}, but traces are sent only as {PROTOCOL}; change or unset it"
    try:
        require(asked_by, *MODULES)
    except StartupError as error:
        return error.message
    return ""
