"""A front beside the owner, which starts it with two descriptors: CONTROL and LISTENER."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from tureen.api_workers.joining import JoinedClient
from tureen.api_workers.session_proxy import Entrance
from tureen.api_workers.start import DOOR, OWNER
from tureen.api_workers.totals import samples_of
from tureen.api_workers.wire import Answer, Ask, Figures, Order, SharedFacts, Unable, Wire
from tureen.app.application import build_app
from tureen.build import find_model, media_loader
from tureen.config import Config
from tureen.config_facts import is_alone
from tureen.errors import TureenError
from tureen.http.server import Server
from tureen.log import LOGGER_NAME, get_logger, set_up_logging
from tureen.media.loader import MediaLoader
from tureen.requests.preparing import probe_when_idle
from tureen.requests.state import ServerState
from tureen.sandbox.budget import helper_bytes
from tureen.server import SWITCH_INTERVAL_S, fastest_event_loop
from tureen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tureen.data_parallel.router import Router

FIGURES_S = 1.0
"""Seconds between two reports of what the front has counted."""

DRAINING_S = 0.05
MIB = 1 << 20
NUMBERS = 48
"""Bits of the numbers of one front's requests; the front's own number is above them, so no two have the same."""

log = get_logger("fronts")


def model_of(config: Config) -> tuple[Tokenizer, MediaLoader | None]:
    """Returns the tokenizer of the model, and what loads its pictures. Raises StartupError."""
    model = find_model(config)
    return model.tokenizer, media_loader(config, model)


def own_config(config: Config) -> Config:
    """Returns the settings of a front that is not the owner: it keeps nothing for clients who come back."""
    share = helper_bytes(config) // config.api_workers // MIB
    return msgspec.structs.replace(
        config,
        batch_path=None,
        responses_store=None,
        sessions_db=None,
        usage_db=None,
        resume_grace_s=0.0,
        helper_memory_mib=max(1, share),
    )


class FrontServer(Server):
    """The HTTP server of a front. The owner says when it drains, reloads and ends; signals do not."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        pass

    def _handle_hang_up(self, _: int, __: FrameType | None) -> None:
        pass


class OrderTaker:
    """Does what the owner asks."""

    def __init__(self, wire: Wire, client: JoinedClient | Router, state: ServerState, server: FrontServer) -> None:
        self._wire = wire
        self._client = client
        self._state = state
        self._server = server
        self._period_s = FIGURES_S

    async def listen(self) -> None:
        """Answers the owner until it is gone; then this process must end."""
        while isinstance(message := await self._wire.receive(), Ask):
            value = self._do(message.op, message.args)
            if message.number:
                self._wire.send(Answer(message.number, value))
        os._exit(1)

    async def report(self) -> None:
        """Tells the owner, again and again, what was counted."""
        while True:
            self.tell()
            await asyncio.sleep(self._period_s)

    def tell(self) -> None:
        metrics, health = self._state.metrics, self._state.client.health
        metrics.raise_to("num_resumed_requests", health.num_resumed)
        metrics.raise_to("num_grammar_unverified", self._state.helpers.num_unverified)
        figures = Figures(
            self._state.common.num_running,
            samples_of(metrics),
            num_asked=self._client.num_asked if isinstance(self._client, JoinedClient) else 0,
            loads=[replica.load for replica in self._router.replicas] if self._router else [],
            news=self._router.company.prefixes.take_news() if self._router else [],
        )
        self._wire.send(Answer(0, msgspec.to_builtins(figures)))

    def take(self, facts: SharedFacts) -> None:
        """Tells clients these facts from now on."""
        logging.getLogger(LOGGER_NAME).setLevel(facts.log_level)
        self._state.adapters = facts.adapters
        self._state.serve_weights(path=facts.model_path, version=facts.weight_version)
        if self._router is not None:
            self._router.follow(facts.replicas)

    @property
    def _router(self) -> Router | None:
        """The client, where there are several engines."""
        return None if isinstance(self._client, JoinedClient) else self._client

    def _do(self, op: str, args: dict[str, Any]) -> object:
        match op:
            case "facts":
                self.take(msgspec.convert(args["facts"], SharedFacts))
            case "abort":
                return self._state.common.abort(args["rid"], args["reason"], owner=args["owner"])
            case "figures":
                self.tell()
            case "down" if isinstance(self._client, JoinedClient):
                self._client.expect_none(args["reason"])
            case "others" | "question" if self._router is not None:
                return importlib.import_module("tureen.api_workers.following").take(self._router, op, args)
            case "drain":
                self._state.lifecycle.drain()
                self._period_s = DRAINING_S
                if self._server.started:  # before, its first report says that it does
                    self.tell()
            case "reload":
                self._server.reload()
            case "end":
                self._server.should_exit = True
        return True


async def _run(control: socket.socket, listener: socket.socket) -> None:
    wire = Wire(*await asyncio.open_connection(sock=control))
    order = await wire.receive()
    if not isinstance(order, Order):
        return
    set_up_logging(order.config.log_level, order.config.log_format)
    logging.getLogger("tureen.stats").setLevel(logging.WARNING)  # the owner reports on the engine
    folder, config = Path(order.folder), own_config(order.config)
    client: JoinedClient | Router | None = None
    try:
        module, name = order.factory.split(":")
        tokenizer, media = await asyncio.to_thread(getattr(importlib.import_module(module), name), config)
        client = await _join(config, folder, order.facts)
        app = build_app(client, tokenizer, config, media=media)
        state: ServerState = app.state.server
        state.number_from((order.number << NUMBERS) + 1)
        entrance = Entrance(app, order.config, str(folder / OWNER))

        def ready() -> None:
            tasks.extend(map(asyncio.create_task, (worker.report(), probe_when_idle(state))))

        server = FrontServer(entrance, config, ready)
    except TureenError as error:
        wire.send(Unable(error.message))
        if client is not None:
            await client.close()
        return
    worker = OrderTaker(wire, client, state, server)
    worker.take(order.facts)
    gc.freeze()
    tasks = [asyncio.create_task(worker.listen())]
    await server.serve(sockets=[listener])
    await client.close()


async def _join(config: Config, folder: Path, facts: SharedFacts) -> JoinedClient | Router:
    """Returns the client of the engine, or of all, that the owner has. Raises StartupError."""
    if not is_alone(config):
        following = importlib.import_module("tureen.api_workers.following")
        router: Router = await following.join(config, folder, facts.replicas)
        return router
    client = JoinedClient(str(folder / DOOR), config)
    await client.start()
    return client


def main(control: int, listener: int) -> None:
    """Runs a front until the owner ends it, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner decides
    for descriptor in (control, listener):
        os.set_inheritable(descriptor, False)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=fastest_event_loop()) as runner:
        runner.run(_run(socket.socket(fileno=control), socket.socket(fileno=listener)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
