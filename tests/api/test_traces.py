"""Traces reach a collector as OpenTelemetry has them, and what they say is what clients got."""

from __future__ import annotations

import asyncio
import gzip
import importlib.metadata
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec
import pytest
from app_under_test import App
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, url_attributes
from timeouts import PATIENCE_S

from tureen import __version__, extras
from tureen.api_workers.proxy import answer_passed
from tureen.api_workers.session_proxy import Entrance
from tureen.config import Config
from tureen.contract.types import OutputDelta, StepTimes, Timeline
from tureen.engine.times import RequestTimes
from tureen.errors import StartupError
from tureen.http import tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "xyzzy"
CHAT = {"messages": [{"role": "user", "content": f"Say {SECRET}"}], "max_tokens": 6, "temperature": 0.5}
KNOWN = {
    value
    for module in (gen_ai_attributes, error_attributes, http_attributes, url_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}


class Span:
    """A span as the collector got it."""

    def __init__(self, span: Any, resource: dict[str, Any]) -> None:
        self.name, self.service, self.version = span.name, resource["service.name"], resource["service.version"]
        self.trace, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.began, self.ended = span.start_time_unix_nano, span.end_time_unix_nano
        self.is_error = span.status.code == span.status.STATUS_CODE_ERROR
        self.attributes = {pair.key: _plain(pair.value) for pair in span.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class Collector:
    """An HTTP server that keeps what is sent to /v1/traces."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,)
        )  # how often it looks for its end
        self._thread.start()

    def spans(self) -> list[Span]:
        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {pair.key: _plain(pair.value) for pair in resource.resource.attributes}
                found += [Span(span, names) for scope in resource.scope_spans for span in scope.spans]
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    """Whose answers a server that ends waits for, however slow the machine is."""
    monkeypatch.setattr("tureen.http.spans.CLOSE_S", PATIENCE_S)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(PATIENCE_S))
    running = Collector()
    yield running
    running.close()


def traced(collector: Collector, body: dict[str, Any], *, path: str = "/v1/chat/completions", **settings: Any) -> Any:
    """Sends one request in a client's trace. Returns its answer; all spans are there then."""
    with App(chat_template="chatml", **settings) as app:
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = app.request("POST", path, json=body, headers=header)
    return answer


def one(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_a_chat_is_a_tree_of_spans_in_its_client_s_trace(collector):
    answer = traced(collector, CHAT, otlp_endpoint=collector.url)
    spans = collector.spans()
    assert {span.trace for span in spans} == {TRACE}
    request = one(spans, "POST /v1/chat/completions")
    output, engine = one(spans, "chat fake-model"), one(spans, "engine")
    parents = {request.id: PARENT, output.id: request.id, engine.id: output.id}
    assert {span.id: span.parent for span in (request, output, engine)} == parents
    assert {span.name for span in spans if span.parent == engine.id} == {"queue", "prefill", "decode"}
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["http.route"] == "/v1/chat/completions"
    assert request.attributes["tureen.request_id"] == answer.headers["x-request-id"]


def test_phases_follow_each_other_and_steps_are_inside_them(collector):
    traced(collector, CHAT, otlp_endpoint=collector.url)
    spans = collector.spans()
    request, engine = one(spans, "POST /v1/chat/completions"), one(spans, "engine")
    queue, prefill, decode = (one(spans, name) for name in ("queue", "prefill", "decode"))
    times = [engine.began, queue.began, queue.ended, prefill.began, prefill.ended, decode.began, decode.ended]
    assert times == sorted(times)
    assert (queue.began, queue.ended, prefill.ended) == (engine.began, prefill.began, decode.began)
    assert decode.ended <= engine.ended <= request.ended
    steps = [span for span in spans if span.name == "step"]
    assert len(steps) == engine.attributes["tureen.steps"] == 6
    assert [step.parent for step in sorted(steps, key=lambda step: step.began)] == [prefill.id] + [decode.id] * 5
    for step in steps:
        parent = next(span for span in spans if span.id == step.parent)
        assert parent.began <= step.began <= step.ended <= parent.ended


def test_attributes_have_the_names_of_the_conventions_and_the_numbers_of_the_answer(collector):
    answer = traced(collector, CHAT | {"top_p": 0.9, "seed": 7}, otlp_endpoint=collector.url).json()
    spans = collector.spans()
    named = {name for span in spans for name in span.attributes}
    assert {name for name in named if not name.startswith("tureen.")} <= KNOWN
    attributes = one(spans, "chat fake-model").attributes
    usage = answer["usage"]
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == [answer["choices"][0]["finish_reason"]]
    sent = {name: attributes[f"gen_ai.request.{name}"] for name in ("temperature", "top_p", "seed", "max_tokens")}
    assert sent == {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 6}
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0


def test_an_engine_that_computed_the_prompt_for_another_has_its_own_span(collector, monkeypatch):
    """Both are below the output, in the order of their work."""
    prompt = Timeline(1, 0, 0, 9, 1, (StepTimes(2, 8, 64),))
    end = RequestTimes.end
    monkeypatch.setattr(RequestTimes, "end", lambda self: msgspec.structs.replace(end(self), prompt=prompt))
    traced(collector, CHAT, otlp_endpoint=collector.url)
    spans = collector.spans()
    output = one(spans, "chat fake-model")
    first, second = sorted((span for span in spans if span.name == "engine"), key=lambda span: span.began)
    assert {first.parent, second.parent} == {output.id}
    parts = {span.name: (span.began, span.ended) for span in spans if span.parent == first.id}
    assert parts == {"queue": (1, 2), "prefill": (2, 9)}
    assert {span.name for span in spans if span.parent == second.id} == {"queue", "prefill", "decode"}


def test_a_constrained_output_waits_for_its_grammar_and_every_sample_has_its_spans(collector):
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4, "n": 2, "regex": "[ab]{4}"}}
    assert traced(collector, body, path="/generate", otlp_endpoint=collector.url).status_code == 200
    spans = collector.spans()
    outputs = [span for span in spans if span.name == "text_completion fake-model"]
    assert len(outputs) == 2
    assert {span.attributes["gen_ai.request.choice.count"] for span in outputs} == {2}
    engines = {span.id: span for span in spans if span.name == "engine"}
    grammars = [span for span in spans if span.name == "grammar"]
    assert sorted(span.parent for span in grammars) == sorted(engines)
    assert all(engines[span.parent].began == span.began <= span.ended for span in grammars)


def test_the_steps_of_a_long_output_are_counted_where_they_are_not_listed(collector):
    body = {"text": "a", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    traced(collector, body, path="/generate", otlp_endpoint=collector.url)
    spans = collector.spans()
    assert one(spans, "engine").attributes["tureen.steps"] == 100
    assert sum(span.name == "step" for span in spans) == 32


def test_a_refused_request_is_a_span_without_an_output(collector):
    traced(collector, CHAT | {"top_p": 7}, otlp_endpoint=collector.url)
    (span,) = collector.spans()
    assert (span.attributes["http.response.status_code"], span.is_error) == (400, False)


def test_embeddings_are_an_operation_of_their_own(collector):
    traced(collector, {"input": "a"}, path="/v1/embeddings", otlp_endpoint=collector.url)
    attributes = one(collector.spans(), "embeddings fake-model").attributes
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.usage.input_tokens"]) == ("embeddings", 1)


def test_nothing_of_what_clients_say_is_in_a_trace(collector):
    traced(collector, CHAT | {"stop": [SECRET], "user": SECRET, "rid": "r"}, otlp_endpoint=collector.url)
    assert collector.bodies
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_a_trace_that_its_client_does_not_record_is_not_sent(collector):
    with App(otlp_endpoint=collector.url) as app:
        header = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert app.request("POST", "/generate", json={"text": "a"}, headers=header).status_code == 200
    assert collector.spans() == []


def test_a_request_without_a_trace_begins_one_and_probes_begin_none(collector):
    with App(otlp_endpoint=collector.url) as app:
        for path in ("/health", "/metrics"):
            app.request("GET", path)
        app.request("POST", "/generate", json={"text": "a"}, headers={"traceparent": "nonsense"})
    spans = collector.spans()
    request = one(spans, "POST /generate")
    assert (request.parent, {span.trace for span in spans}) == ("", {request.trace})


def test_the_standard_variables_are_enough(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chats")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    traced(collector, CHAT)
    assert {span.service for span in collector.spans()} == {"chats"}


def test_a_copy_that_no_installer_has_seen_sends_traces_with_its_version(collector, monkeypatch):
    read = importlib.metadata.version

    def version(name: str) -> str:
        if name == "tureen":
            raise importlib.metadata.PackageNotFoundError(name)
        return read(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    traced(collector, CHAT, otlp_endpoint=collector.url)
    assert {span.version for span in collector.spans()} == {__version__}


def test_a_service_without_a_name_is_tureen(collector):
    traced(collector, CHAT, otlp_endpoint=collector.url + "/v1/traces")
    assert {span.service for span in collector.spans()} == {"tureen"}


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_the_standard_variables_turn_it_off(collector, monkeypatch, off):
    for name, value in ({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url} | off).items():
        monkeypatch.setenv(name, value)
    traced(collector, CHAT)
    assert collector.bodies == []


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://"])
def test_an_endpoint_that_is_no_address_is_refused_with_one(endpoint):
    with pytest.raises(StartupError, match=r"--otlp-endpoint .*such as http://127\.0\.0\.1:4318"):
        tracing.check_tracing(Config(otlp_endpoint=endpoint))


def test_a_call_that_another_front_answers_is_no_span_of_this_one(collector, tmp_path):
    """The one that answers it has a span of it: else one call of a client were two of a server."""

    async def owner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 202, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask(app: App, path: str) -> list[int]:
        async def answer(reader: Any, writer: Any) -> None:
            await answer_passed(owner, reader, writer)

        front = httpx.ASGITransport(Entrance(app.app, app.config, path))
        async with await asyncio.start_unix_server(answer, path), httpx.AsyncClient(transport=front) as client:
            answers = [
                await client.post("http://127.0.0.1/generate", json={"text": "say:a"} | more)
                for more in ({"session_params": {"id": "elsewhere", "rid": None}}, {})
            ]
        return [answer.status_code for answer in answers]

    with App(otlp_endpoint=collector.url) as app:
        assert app.run(ask(app, str(tmp_path / "owner"))) == [202, 200]
    assert one(collector.spans(), "POST /generate").attributes["http.response.status_code"] == 200


def test_a_missing_extra_is_an_error_for_the_flag_and_a_warning_for_variables(monkeypatch, caplog):
    monkeypatch.setattr(extras, "is_installed", lambda module: not module.startswith("opentelemetry"))
    with pytest.raises(StartupError, match=r"--otlp-endpoint needs opentelemetry\.sdk.*pip install 'tureen\[otel\]'"):
        tracing.check_tracing(Config(otlp_endpoint="http://127.0.0.1:4318"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    tracing.check_tracing(Config())
    assert "traces are not sent" in caplog.text
    with App() as app:
        assert app.generate(text="a")


def test_another_protocol_than_http_is_refused_by_its_variable(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(StartupError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        tracing.check_tracing(Config(otlp_endpoint="http://127.0.0.1:4318"))


def test_times_cross_to_another_process_as_they_are():
    delta = OutputDelta("1", timeline=Timeline(1, 2, 3, 4, 9, (StepTimes(1, 2, 3),)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=OutputDelta) == delta
