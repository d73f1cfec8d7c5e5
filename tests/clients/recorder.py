"""Keeps what clients send, in a proxy: the requests become the golden tests of tests/api/test_recorded_clients.py.

What each client is, what was asked of it and what the server told or refused becomes docs/clients.md.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "clients"
RUNS = GOLDEN.parent / "client_runs.json"
ARITHMETIC = ("kernels", "dtype", "quantization", "kv_cache_dtype")
"""Settings that say with which numbers the server computes."""

JSON_TYPE = "application/json"
KEPT_HEADERS = ("accept", "anthropic-version")
NOT_FORWARDED = ("transfer-encoding", "connection", "content-length")


class Recorder:
    """Passes requests on to `target`; notes those with a JSON body under the name of the client that sends them now."""

    def __init__(self, target: str) -> None:
        self.client = ""
        self.runs: dict[str, dict[str, Any]] = {}  # client -> its title, versions, checks, told fields, refusals
        self._target = urlsplit(target)
        self._seen: dict[str, list[dict[str, Any]]] = {}
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                recorder.pass_on(self)

            do_POST = do_PUT = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        self._note(handler, body)
        upstream = http.client.HTTPConnection(self._target.hostname, self._target.port)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "host"}
        upstream.request(handler.command, handler.path, body or None, headers)
        response = upstream.getresponse()
        handler.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in NOT_FORWARDED:
                handler.send_header(name, value)
        handler.send_header("connection", "close")
        handler.end_headers()
        first = response.read1(65536)
        self._note_answer(response, first)
        piece = first
        while piece:
            handler.wfile.write(piece)
            handler.wfile.flush()
            piece = response.read1(65536)
        handler.close_connection = True

    def _note_answer(self, response: http.client.HTTPResponse, body: bytes) -> None:
        run = self.runs[self.client]
        ignored = response.getheader("x-tureen-ignored")
        run["told"] = sorted({*run["told"], *(ignored.split(", ") if ignored else [])})
        if response.status in (400, 404, 422):
            run["refused"] = sorted({*run["refused"], _message(body)})

    def _note(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if body and JSON_TYPE not in handler.headers.get("content-type", ""):
            return  # a file that is sent up
        headers = {name: handler.headers[name] for name in KEPT_HEADERS if name in handler.headers}
        request = {
            "method": handler.command,
            "path": handler.path,
            "headers": headers,
            "body": json.loads(body) if body else None,
        }
        seen = self._seen.setdefault(self.client, [])
        if request not in seen:
            seen.append(request)

    def _computed_with(self) -> str:
        """Returns what the server computes with: its model, the types of its numbers, its settings of arithmetic."""
        model, settings = (
            json.load(urllib.request.urlopen(f"{self._target.geturl()}/{name}"))
            for name in ("get_model_info", "get_server_info")
        )
        flags = " ".join(f"--{name.replace('_', '-')} {settings[name]}" for name in ARITHMETIC if settings.get(name))
        return f"{model['served_model_name']}, weights in {model['dtype']} on {model['device']}, {flags}"

    def close(self) -> None:
        """Writes one file for each client."""
        self._server.shutdown()
        computed_with = self._computed_with()
        for run in self.runs.values():
            run["computed_with"] = computed_with
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for client, requests in self._seen.items():
            records = [{"request": request, "answer": None} for request in requests]
            text = json.dumps(records, indent=1, ensure_ascii=False) + "\n"
            (GOLDEN / f"{client}.json").write_text(text, encoding="utf-8")
        known = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else {}
        text = json.dumps(known | self.runs, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        RUNS.write_text(text, encoding="utf-8")


def _message(body: bytes) -> str:
    """Returns the message of an error in any API's form."""
    try:
        error = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")[:200]
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or str(error)
    return str(error)[:200]
