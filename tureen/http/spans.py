"""Traces of requests: a span of the HTTP request, below it one for each output, below that the engine's work for it.

Names of attributes are those of OpenTelemetry's semantic conventions for HTTP and for generative AI. Attributes that
the conventions do not name begin with `tureen.`. No span has text of a client or of a model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.util.types import AttributeValue
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tureen import __version__
from tureen.contract.types import StepTimes, Timeline
from tureen.http.call import ClientCall, call_of
from tureen.http.dialect import Entry
from tureen.http.middleware import QUIET_PATHS, find_route
from tureen.requests.generation import Output

TRACES_PATH = "/v1/traces"
CLOSE_S = 2.0
"""Seconds that a server waits for a collector at its end."""

CHATS = ("chat", "messages", "responses", "invocations")
EMBEDDINGS = ("embeddings", "encode", "embed", "rerank")
"""Last parts of the paths of chats, and of those that return embeddings; the other paths complete texts."""


class Traces:
    """A Service that sends spans to a collector, in a thread of its own."""

    def __init__(self, endpoint: str | None) -> None:
        """`endpoint`: without the path; None = OpenTelemetry's variables name it."""
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "tureen"}))
        url = None if endpoint is None else endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("tureen", __version__)

    def start(self) -> None:
        pass

    def drain(self) -> None:
        pass

    async def close(self) -> None:
        """Sends the remaining spans, for at most CLOSE_S."""
        end = asyncio.get_running_loop().call_later(CLOSE_S, self._exporter.shutdown)  # it tries no more
        await asyncio.to_thread(self._provider.shutdown)
        end.cancel()


class Traced:
    """ASGI middleware that traces requests, in the trace that a client's `traceparent` names."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._tracer = traces.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        span = self._begin(scope)

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                _note_status(span, message["status"])
            await send(message)

        call = call_of(scope)
        call.trace = RequestSpans(self._tracer, span, call, scope["path"]) if span.is_recording() else None
        try:
            await self._app(scope, receive, send_noting)
        except Exception:  # an edge: the outer middleware answers it
            _note_status(span, 500)
            raise
        finally:
            if not call.is_elsewhere:  # else the front that answers exports its own span instead
                span.set_attribute("tureen.request_id", call.request_id)
                span.end()

    def _begin(self, scope: Scope) -> Span:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = _template(find_route(scope))
        attributes: dict[str, AttributeValue] = {
            "http.request.method": scope["method"],
            "url.scheme": scope["scheme"],
            "url.path": scope["path"],
        }
        if path:
            attributes["http.route"] = path
        return self._tracer.start_span(
            f"{scope['method']} {path}".strip(),
            propagate.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )


def _template(route: BaseRoute | None) -> str:
    """Returns the path of a route, with names in place of its variable parts."""
    return route.path if isinstance(route, Entry) else ""


def _note_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))


class RequestSpans:
    """The spans below that of one HTTP request; a RequestTrace."""

    def __init__(self, tracer: Tracer, parent: Span, call: ClientCall, path: str) -> None:
        self.trace_id = format_trace_id(parent.get_span_context().trace_id)
        self._tracer = tracer
        self._parent = parent
        self._call = call
        self._operation = _operation(path)

    def add(self, output: Output, finish: str, model_name: str) -> None:
        ended_ns = time.time_ns()
        began_ns = ended_ns - int((time.monotonic() - output.started_s) * 1e9)
        span = self._span(f"{self._operation} {model_name}", self._parent, began_ns, _facts(output, finish))
        span.set_attribute("gen_ai.operation.name", self._operation)
        span.set_attribute("gen_ai.request.model", model_name)
        span.set_attribute("gen_ai.response.model", model_name)
        if self._call.work is not None and self._call.work.first_token_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", self._call.work.first_token_s)
        if finish == "error":
            span.set_status(Status(StatusCode.ERROR))
        if output.remarks.timeline is not None:
            for times in filter(None, (output.remarks.timeline.prompt, output.remarks.timeline)):
                self._add_engine(span, times)
        span.end(ended_ns)

    def _add_engine(self, parent: Span, times: Timeline) -> None:
        engine = self._span("engine", parent, times.received_ns, {"tureen.steps": times.num_steps})
        for part in parts(times):
            span = self._span(part.name, engine, part.began_ns)
            for step in part.steps:
                self._span("step", span, step.began_ns, {"tureen.step.tokens": step.num_tokens}).end(step.ended_ns)
            span.end(part.ended_ns)
        engine.end(times.ended_ns)

    def _span(
        self, name: str, parent: Span, began_ns: int, attributes: Mapping[str, AttributeValue] | None = None
    ) -> Span:
        context = set_span_in_context(parent)
        return self._tracer.start_span(name, context, start_time=began_ns, attributes=attributes)


def _operation(path: str) -> str:
    """Returns the conventions' name for the operation of a path."""
    last = path.rstrip("/").rpartition("/")[2]
    if last in EMBEDDINGS:
        return "embeddings"
    return "chat" if last in CHATS or "/chat/" in path else "text_completion"


class Part(NamedTuple):
    """A part of the engine's work for a request."""

    name: str
    began_ns: int
    ended_ns: int
    steps: Sequence[StepTimes] = ()


def parts(times: Timeline) -> Iterator[Part]:
    """Yields, in order, the times that a request waited for its grammar and in the queue, and those of computing its
    prompt and its output."""
    if times.compiled_ns:
        yield Part("grammar", times.received_ns, times.compiled_ns)
    begun_ns = times.steps[0].began_ns if times.steps else times.ended_ns
    yield Part("queue", times.compiled_ns or times.received_ns, begun_ns)
    if not times.steps:
        return
    drawn_ns = times.drawn_ns or times.ended_ns
    yield Part("prefill", begun_ns, drawn_ns, [step for step in times.steps if step.ended_ns <= drawn_ns])
    if times.drawn_ns:
        steps = [step for step in times.steps if step.ended_ns > drawn_ns]
        yield Part("decode", drawn_ns, times.ended_ns, steps)


def _facts(output: Output, finish: str) -> dict[str, AttributeValue]:
    request, params = output.request, output.request.params
    facts: dict[str, AttributeValue | None] = {
        "gen_ai.provider.name": "tureen",
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.response.id": output.rid,
        "gen_ai.response.finish_reasons": (finish,),
        "gen_ai.usage.input_tokens": output.usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": output.usage.cached_tokens,
        "gen_ai.usage.output_tokens": len(output.token_ids),
        "error.type": "_OTHER" if finish == "error" else None,
    }
    return {name: value for name, value in facts.items() if value is not None}
