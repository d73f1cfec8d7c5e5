"""Talks to a server: JSON there and back, and streams of server-sent events."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tureen.errors import StartupError, TureenError

CONNECT_TIMEOUT_S = 10.0


class ChatError(TureenError):
    """The server refused a request, or cannot be reached. `field` is the one that the server named."""

    code = "chat_error"


class UnixConnection(http.client.HTTPConnection):
    """A connection to a server that listens on a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class ServerAddress:
    """A server's address and the key that opens it. Each call makes a connection of its own: to close it is to end the
    generation."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url`: http://HOST:PORT, https://HOST:PORT or unix:PATH. Raises StartupError for another."""
        self.url = url if "://" in url or url.startswith("unix:") else f"http://{url}"
        parts = urlsplit(self.url)
        try:
            self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        except ValueError as error:
            raise StartupError(f"--url {url}: {error}") from None
        if parts.scheme not in ("http", "https", "unix") or not (self._host or parts.scheme == "unix"):
            raise StartupError(f"--url {url}: must be http://HOST:PORT, https://HOST:PORT or unix:PATH")
        self._scheme = parts.scheme
        self._headers = {"Content-Type": "application/json", "x-tureen-strict": "1"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def answers(self) -> bool:
        """Says whether a server is there and ready."""
        try:
            self.ask("GET", "/health")
        except ChatError:
            return False
        return True

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Returns the JSON of an answer, or None for one without. Raises ChatError."""
        connection, answer = self._send(method, path, body)
        try:
            text = answer.read()
        finally:
            connection.close()
        return json.loads(text) if text.strip() else None

    def events(self, path: str, body: object) -> Iterator[Any]:
        """Yields the JSON of each event of a stream. To close the iterator ends the generation. Raises ChatError."""
        connection, answer = self._send("POST", path, body)
        try:
            while line := answer.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise _error(event)
                yield event
            raise ChatError("the server ended the stream before the answer was whole")
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection to {self.url} broke: {error}") from None
        finally:
            answer.close()
            connection.close()

    def _send(
        self, method: str, path: str, body: object
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Returns a connection and the answer's head. Raises ChatError for a status of 400 and more."""
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a server may think for minutes
            connection.request(
                method, self._prefix + path, json.dumps(body) if body is not None else None, self._headers
            )
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(f"no answer from {self.url}: {error}") from None
        except BaseException:
            connection.close()
            raise
        if answer.status < 400:
            return connection, answer
        text = answer.read()
        connection.close()
        if answer.status == http.HTTPStatus.UNAUTHORIZED:
            wrong = "another API key" if "Authorization" in self._headers else "an API key"
            raise ChatError(f"the server at {self.url} wants {wrong}; give --api-key KEY or set TUREEN_API_KEY")
        try:
            raise _error(json.loads(text))
        except ValueError:
            raise ChatError(f"{self.url}{path} answered {answer.status} {answer.reason}") from None

    def _connection(self) -> http.client.HTTPConnection:
        if self._scheme == "unix":
            connection: http.client.HTTPConnection = UnixConnection(self.url.removeprefix("unix:").removeprefix("//"))
            self._prefix = ""
        elif self._scheme == "https":
            connection = http.client.HTTPSConnection(self._host or "", self._port, timeout=CONNECT_TIMEOUT_S)
        else:
            connection = http.client.HTTPConnection(self._host or "", self._port, timeout=CONNECT_TIMEOUT_S)
        return connection


def _error(answer: Any) -> ChatError:
    """Returns the error that an answer of the form {"error": {"message", "param"}} tells."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return ChatError(f"the server answered {json.dumps(answer)[:200]}")
    field = error.get("param")
    return ChatError(str(error.get("message")), field=field if isinstance(field, str) else None)
