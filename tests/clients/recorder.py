"""A proxy that keeps what clients send: the requests become the golden tests of tests/api/test_recorded_clients.py."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "clients"
KEPT_HEADERS = ("accept", "anthropic-version")
NOT_FORWARDED = ("transfer-encoding", "connection", "content-length")


class Recorder:
    """Passes requests on to `target`; notes those with a JSON body under the name of the client that sends them now."""

    def __init__(self, target: str) -> None:
        self.client = ""
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
        while piece := response.read1(65536):
            handler.wfile.write(piece)
            handler.wfile.flush()
        handler.close_connection = True

    def _note(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        headers = {name: handler.headers[name] for name in KEPT_HEADERS if name in handler.headers}
        one = {
            "method": handler.command,
            "path": handler.path,
            "headers": headers,
            "body": json.loads(body) if body else None,
        }
        seen = self._seen.setdefault(self.client, [])
        if one not in seen:
            seen.append(one)

    def close(self) -> None:
        """Writes one file for each client."""
        self._server.shutdown()
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for client, requests in self._seen.items():
            records = [{"request": one, "answer": None} for one in requests]
            text = json.dumps(records, indent=1, ensure_ascii=False) + "\n"
            (GOLDEN / f"{client}.json").write_text(text, encoding="utf-8")
