"""The application over a fake engine, driven from synchronous tests: without sockets, or on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import loop_host
import msgspec
import uvloop
import virtual_clock
from byte_tokenizer import make_byte_tokenizer
from fake_engine import make_engine, make_slow_engine
from inline_checker import InlineChecker
from prometheus_client.parser import text_string_to_metric_families
from timeouts import PATIENCE_S, until, wait_until
from virtual_clock import Clock, VirtualLoop, replaced

from tureen.app.application import build_app
from tureen.config import Config
from tureen.http.listener import bind
from tureen.http.server import Server
from tureen.media.loader import MediaLoader
from tureen.requests import template_pool
from tureen.requests.state import ServerState
from tureen.serving.healing import HealingClient
from tureen.serving.inproc import InprocClient
from tureen.text.tokenizer import Tokenizer

LOCAL = "http://127.0.0.1"


class EngineMaker:
    """Makes an engine in the thread that runs it, and keeps it."""

    def __init__(self, factory: Callable[..., Any], config: Config) -> None:
        self._factory = factory
        self._config = config

    def __call__(self, report: Any) -> Any:
        self._engine, info = self._factory(self._config, progress=report)
        return self._engine, info

    def hurry(self) -> None:
        """A slow engine's steps take no time from now on: a test has seen what had to last, and waits for the end."""
        self._engine.rows._runner._step_s = 0.0


class App:
    """The ASGI application, and its engine on the same event loop, which stands still between calls.

    The clock is virtual: no test waits for a time-out or for a slow engine. Helper processes are functions here.
    """

    def __init__(
        self,
        *,
        slow: bool = False,
        facts: dict[str, Any] | None = None,
        media: MediaLoader | None = None,
        special: tuple[str, ...] = (),
        factory: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> None:
        """`facts` replace what the engine says of itself; the tokenizer also knows `special` tokens. `factory` makes
        another engine."""
        self.config = Config(**settings)
        self._maker = EngineMaker(factory or (make_slow_engine if slow else make_engine), self.config)
        self._begin()
        self.client = self.run(self._connect(self._maker))
        self.client.info = msgspec.structs.replace(self.client.info, **(facts or {}))
        try:
            self._serve(make_byte_tokenizer(*special), media)
        except BaseException:
            self.run(self.client.close())
            self._runner.close()
            raise

    def _begin(self) -> None:
        """Makes the clock and the event loop."""
        self.clock = Clock()
        self._runner = asyncio.Runner(loop_factory=lambda: VirtualLoop(self.clock))

    def _serve(self, tokenizer: Tokenizer, media: MediaLoader | None = None) -> None:
        """Builds the application over the client."""
        with self.time():
            self.app = build_app(self.client, tokenizer, self.config, media=media)
        self._use_clock()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=LOCAL)

    @contextlib.contextmanager
    def time(self) -> Iterator[None]:
        """Where the application's code runs, its clock is the virtual one, and it starts no processes."""
        with virtual_clock.running(self.clock), replaced((template_pool, "_can_have_pool", lambda: False)):
            yield

    def _use_clock(self) -> None:
        for state in self.app.state.server.common.states:
            state.helpers._checker = InlineChecker()
            for part in (state.sessions, state.quotas, state.recordings):
                part._clock = self.clock.monotonic

    @property
    def state(self) -> ServerState:
        return self.app.state.server

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run like `asyncio.Runner.run`, without its handler of Ctrl-C, which costs more than a short request."""
        loop = self._runner.get_loop()
        with self.time():
            return loop.run_until_complete(loop.create_task(work, context=self._runner._context))

    async def _connect(self, factory: Any) -> HealingClient:
        client = loop_host.connect(factory, self.clock)
        await client.start()
        return client

    def request(self, method: str, path: str, **how: Any) -> httpx.Response:
        return self.run(self.http.request(method, path, **how))

    def post(self, path: str = "/generate", **body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def generate(self, **body: Any) -> Any:
        response = self.post(**body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """Each event's payload; checks the frame of the stream."""
        response = self.post(**body, stream=True)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    def error(self, **body: Any) -> dict[str, Any]:
        response = self.post(**body)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    def check_idle(self) -> None:
        """Nothing runs and no page is held."""
        self.wait_until(self._is_idle)

    def wait_until(self, condition: Callable[[], object], what: object = "what was waited for") -> None:
        self.run(until(condition, what))

    def _is_idle(self) -> bool:
        stats = self.client.stats
        is_free = stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        return is_free and not stats.num_running and not stats.num_queued and not self.state.num_running

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.request("GET", "/metrics").text)

    def close(self) -> None:
        self.run(self.http.aclose())
        self.run(self.client.close())
        self.run(self.state.common.close())
        with self.time():
            self._runner.close()

    def __enter__(self) -> App:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ThreadedApp(App):
    """The same on the real clock, with the engine in a thread and helpers in processes."""

    def _begin(self) -> None:
        self._runner = asyncio.Runner()

    @contextlib.contextmanager
    def time(self) -> Iterator[None]:
        yield

    def _use_clock(self) -> None:
        """Its parts have the real one."""

    def hurry(self) -> None:
        self._maker.hurry()

    async def _connect(self, factory: Any) -> InprocClient:
        client = InprocClient(factory)
        await client.start()
        return client


class LiveServer:
    """The application under uvicorn, in a thread, on a free port."""

    _media: MediaLoader | None = None

    def __init__(
        self,
        *,
        slow: bool = False,
        loop: Callable[[], Any] = uvloop.new_event_loop,
        media: MediaLoader | None = None,
        **settings: Any,
    ) -> None:
        self.config = Config(port=0, **settings)
        self._media = media
        self._maker = EngineMaker(make_slow_engine if slow else make_engine, self.config)
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self._thread.start()
        assert self._is_up.wait(PATIENCE_S)

    def hurry(self) -> None:
        self._maker.hurry()

    @property
    def url(self) -> str:
        return f"{LOCAL}:{self.port}" if self.config.tls_cert is None else f"https://localhost:{self.port}"

    @property
    def stats(self) -> Any:
        return self.client.stats

    def metric(self, name: str) -> float:
        return parse_metrics(httpx.get(f"{self.url}/metrics").text)[name]

    def abandon(self, path: str, body: dict[str, Any], has_begun: Callable[[], object]) -> None:
        """Ask, and leave when it has begun."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            wait_until(has_begun, "the beginning of what is left")

    def hang_up(self) -> None:
        """What SIGHUP does; done when this returns."""
        self._server._event_loop.call_soon_threadsafe(self._server.reload)
        asyncio.run_coroutine_threadsafe(self._reloaded(), self._server._event_loop).result(PATIENCE_S)

    async def _reloaded(self) -> None:
        if self._server._reload is not None:
            await self._server._reload

    def terminate(self) -> None:
        self._server.handle_exit(signal.SIGTERM, None)

    def wait_ended(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self, loop: Callable[[], Any]) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.client = InprocClient(self._maker)
        await self.client.start()
        self.app = build_app(self.client, make_byte_tokenizer(), self.config, media=self._media)
        with bind(self.config) as listener:
            self.port = listener.getsockname()[1]
            self._server = Server(self.app, self.config, self._is_up.set)
            await self._server.serve(sockets=[listener])  # which closes the application
        await self.client.close()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.terminate()
            self.terminate()
        self.wait_ended()


def parse_events(text: str) -> list[dict[str, Any]]:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text[:500]
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def parse_metrics(text: str) -> dict[str, float]:
    """Samples by name without the prefix; label values but the model's in brackets."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for label, value in sample.labels.items() if label != "model_name"]
            name = sample.name.removeprefix("sglang:")
            found[name + (f"[{','.join(labels)}]" if labels else "")] = sample.value
    return found


def asked_by(app: App, path: str, **body):
    """The request that reached the engine."""
    asked = []
    generate = app.client.generate

    def watched(request, *args):
        asked.append(request)
        return generate(request, *args)

    app.client.generate = watched
    try:
        response = app.post(path, **body)
    finally:
        app.client.generate = generate
    assert response.status_code == 200, response.text
    [request] = asked
    return request
