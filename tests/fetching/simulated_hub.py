"""A server on this machine that speaks the routes of the Hugging Face hub and of a package index (PEP 691).

It serves folders of files; it can ask for a token, hold an answer back, end answers in the middle, damage bytes, and
counts the bytes that it sends.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

POLL_S = 0.01
"""How often it looks whether it is closed, which its closing waits for."""

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Simulated:
    """files: "ORG/NAME" -> path -> content; wheels: normalised name -> file name -> content."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.wheels: dict[str, dict[str, bytes]] = {}
        self.commit = COMMIT
        self.token = ""  # "" = asks for none
        self.gated: set[str] = set()
        self.redirects: dict[str, str] = {}  # path -> where else its content is
        self.status: dict[str, int] = {}  # path -> status of an answer
        self.cuts: list[int] = []  # how many bytes each of the next answers with content sends before it ends
        self.hold_after: int | None = None  # bytes after which an answer waits for `go_on`
        self.go_on = threading.Event()
        self.is_held = threading.Event()
        self.has_ranges = True
        self.change_siblings = None  # what becomes of the list of a repository's files
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.authorizations: dict[str, str | None] = {}
        self.num_sent = 0
        simulated = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                simulated.answer(self)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((path, handler.headers.get("Range")))
        self.authorizations[path] = handler.headers.get("Authorization")
        if path in self.redirects:
            handler.send_response(302)
            handler.send_header("Location", self.redirects[path])
            handler.send_header("Content-Length", "0")
            return handler.end_headers()
        if path in self.status:
            return self._refuse(handler, self.status[path], "")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._list(handler, "/".join(parts[2:4]))
        if parts[0] == "simple":
            return self._index(handler, parts[1])
        if parts[0] == "wheels":
            return self._send(handler, self.wheels[parts[1]][parts[2]])
        repository, content = "/".join(parts[:2]), self.files.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
        if self._is_refused(handler, repository):
            return None
        if content is None:
            return self._refuse(handler, 404, "EntryNotFound")
        return self._send(handler, content)

    def _is_refused(self, handler: BaseHTTPRequestHandler, repository: str) -> bool:
        sent = handler.headers.get("Authorization")
        if repository not in self.files:
            self._refuse(handler, 404 if sent else 401, "RepoNotFound")
        elif repository in self.gated:
            self._refuse(handler, 403, "GatedRepo")
        elif self.token and sent != f"Bearer {self.token}":
            self._refuse(handler, 401, "")
        else:
            return False
        return True

    def _list(self, handler: BaseHTTPRequestHandler, repository: str) -> None:
        if self._is_refused(handler, repository):
            return None
        if not handler.path.partition("?")[0].endswith(("/main", f"/{self.commit}")):
            return self._refuse(handler, 404, "RevisionNotFound")
        siblings = []
        for name, content in self.files[repository].items():
            entry = {"rfilename": name, "size": len(content)}
            if name.endswith((".gguf", ".safetensors")):
                entry["blobId"] = "0" * 40
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 9}
            else:
                entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            siblings.append(entry)
        if self.change_siblings is not None:
            siblings = self.change_siblings(siblings)
        return self._json(handler, {"id": repository, "sha": self.commit, "siblings": siblings})

    def _index(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        if name not in self.wheels:
            return self._refuse(handler, 404, "")
        files = [
            {
                "filename": file,
                "url": f"/wheels/{name}/{file}",
                "hashes": {"sha256": hashlib.sha256(content).hexdigest()},
                "size": len(content),
            }
            for file, content in self.wheels[name].items()
        ]
        return self._json(handler, {"meta": {"api-version": "1.1"}, "name": name, "files": files})

    def _json(self, handler: BaseHTTPRequestHandler, value: object) -> None:
        body = json.dumps(value).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        handler.send_response(status)
        if code:
            handler.send_header("X-Error-Code", code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def _send(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        asked = handler.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and self.has_ranges else 0
        if start >= len(content) and asked:
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(content)}")
            handler.send_header("Content-Length", "0")
            return handler.end_headers()
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        cut = self.cuts.pop(0) if self.cuts else len(content)
        piece = content[start : start + cut]
        if self.hold_after is not None:
            held, self.hold_after = self.hold_after, None
            handler.wfile.write(piece[:held])
            handler.wfile.flush()
            self.num_sent += held
            self.is_held.set()
            self.go_on.wait()
            piece = piece[held:]
        handler.wfile.write(piece)
        self.num_sent += len(piece)
        if start + cut < len(content):
            handler.close_connection = True
        return None
