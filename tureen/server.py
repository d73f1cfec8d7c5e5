"""Runs `tureen serve`: binds, loads, answers, drains.

Imports: build, clients, config, config_facts, devices, errors, http, log, run_files, serving, terminal; asyncio.
Imported by: api_workers, bench.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from tureen.build import Model, connect, find_model, may_load_torch, media_loader
from tureen.clients.keys import load_keys
from tureen.config import Config
from tureen.config_facts import asks_for_traces, is_alone
from tureen.devices import cpu
from tureen.errors import StartupError
from tureen.http.listener import LOOPBACK, bind, remove_socket
from tureen.http.origins import check_hosts, check_origins
from tureen.http.tls import load_context
from tureen.log import get_logger, set_up_logging, warn_of_root
from tureen.run_files import RunNote
from tureen.serving.client import EngineClient
from tureen.serving.inproc import ENGINE_THREAD
from tureen.terminal import Access, PhaseDisplay, banner

if TYPE_CHECKING:
    from tureen.http.server import ServedApp

SWITCH_INTERVAL_S = 0.001
"""Seconds for which the engine's thread may keep the interpreter from the event loop."""

CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/run/systemd/container"))
"""Files that Docker, Podman and systemd leave in their containers."""

ON_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address of a server that listens on all of them, for programs on its own machine."""

log = get_logger("http")


def serve(config: Config) -> int:
    """Runs the server until a signal. Returns the exit status: 0 after a drain, 1 when the engine died. Raises
    StartupError."""
    set_up_logging(config.log_level, config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _check_access(config)
    warn_of_root()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server takes it; the engine's process never does
    with asyncio.Runner(loop_factory=fastest_event_loop()) as runner:
        status = runner.run(_serve(config))
    if any(thread.name == ENGINE_THREAD for thread in threading.enumerate()):
        os._exit(status)  # the thread loads or computes still, and would abort the interpreter when that ends
    return status


def _check_access(config: Config) -> None:
    """Raises StartupError for faults in keys, certificates and origins, before anything takes time."""
    needs_key, context = load_keys(config).for_users, load_context(config)
    check_origins(config.allowed_origins)
    check_hosts(config.allowed_hosts)
    if asks_for_traces(config):
        importlib.import_module("tureen.http.tracing").check_tracing(config)
    if config.uds is not None:
        if context is not None:
            raise StartupError("--uds with --tls-cert: a Unix socket needs no TLS; leave one of them out")
        return
    needs_certificate = context is not None and context.verify_mode is ssl.CERT_REQUIRED
    if config.host not in LOOPBACK and not needs_key and not needs_certificate and not _is_in_container():
        log.warning(
            "--host %s without keys: everyone who reaches this machine can use this server; give --api-key, "
            "--api-key-file or --tls-ca, or leave --host out to serve this machine only",
            config.host,
        )


def _is_in_container() -> bool:
    """Says whether this is a container. There the server must listen on all addresses, and who runs the container says
    which reach it."""
    named = {"container", "KUBERNETES_SERVICE_HOST"} & os.environ.keys()
    return bool(named) or any(mark.exists() for mark in CONTAINER_MARKS)


def fastest_event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's loop where there is one for this platform; None = asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def _leave(at_end: contextlib.ExitStack, number: int, _: FrameType | None) -> None:
    """Handle a signal before the server serves: close `at_end`, and let the signal end the process. A thread that loads
    a model cannot be asked to end."""
    at_end.close()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


async def _serve(config: Config) -> int:
    started = time.monotonic()
    with bind(config) as listener, contextlib.ExitStack() as at_end:
        at_end.callback(remove_socket, config)
        at_end.callback(listener.close)
        url = _url(config, listener)
        with PhaseDisplay() as display:
            if config.api_workers > 1:
                loaded = await _load_for_fronts(config, display, listener, at_end)
            else:
                loaded = await (_load_several(config, display) if config.models else _load(config, display))
        client, serving = loaded.client, loaded.app
        server = importlib.import_module("tureen.http.server")
        gc.freeze()  # what start-up made lives as long as the server; collections need not look at it
        gc.enable()
        cpu.trim()  # start-up read the tokenizer and the metadata of the files
        helpers: list[asyncio.Task[None]] = []
        note = RunNote(config)

        def ready() -> None:
            seconds = time.monotonic() - started
            access = Access(url, _credentials(config), config.uds)
            text = banner(client.info, access, seconds, others=loaded.others)
            place = url if config.uds is None else f"unix:{config.uds}"
            note.write(place, client.info.model_name, loaded.source_path)
            print(text, file=sys.stderr, flush=True)  # noqa: T201
            preparing = importlib.import_module("tureen.requests.preparing")
            helpers.append(asyncio.create_task(preparing.probe_when_idle(serving.state.server)))

        try:
            await server.Server(serving, config, ready).serve(sockets=[listener])
        finally:
            note.remove()
        failure = client.failure
        await client.close()
    if failure is not None:
        raise StartupError(f"the engine died: {failure}")
    return 0


class FirstModel(NamedTuple):
    """The model that a server starts with, and the application over it."""

    client: EngineClient
    app: ServedApp
    source_path: Path
    others: tuple[str, ...] = ()  # names of the models that can be loaded besides


async def _load(config: Config, display: PhaseDisplay, start: Callable[..., Any] | None = None) -> FirstModel:
    """Loads the model. start: what starts its engine, where fronts share it. Raises StartupError."""
    model = await asyncio.to_thread(find_model, config, progress=display)
    media = media_loader(config, model)
    shell = asyncio.create_task(asyncio.to_thread(_import_shell))  # while the weights are made ready
    try:
        if may_load_torch(config, model):
            await shell  # two threads that import the same packages may each find the other's half done
        if start is None:
            start = connect if is_alone(config) else importlib.import_module("tureen.data_parallel.start").connect
        client: EngineClient = await start(config, model, progress=display)
    finally:
        app = await shell
    serving = app.build_app(client, model.tokenizer, config, media=media)
    return FirstModel(client, serving, model.source.path)


async def _load_for_fronts(
    config: Config, display: PhaseDisplay, listener: socket.socket, at_end: contextlib.ExitStack
) -> FirstModel:
    """Loads the model, and starts the fronts beside this one. Raises StartupError."""
    fronts = importlib.import_module("tureen.api_workers.start")
    fronts.check(config)
    folder = Path()

    async def start(config: Config, model: Model, *, progress: PhaseDisplay) -> EngineClient:
        nonlocal folder
        sockets = importlib.import_module("tureen.temporary_folder").TemporaryFolder("fronts")
        at_end.callback(sockets.close)
        for number in (signal.SIGINT, signal.SIGTERM):  # from here on, no step holds the interpreter for long
            signal.signal(number, partial(_leave, at_end))
        folder = sockets.path
        client: EngineClient = await fronts.connect(config, model, folder, progress=progress)
        return client

    loaded = await _load(config, display, start)
    try:
        listeners = fronts.more_listeners(listener, config.api_workers - 1)
        owner = importlib.import_module("tureen.api_workers.owner").Fronts(config, folder, listeners, loaded.app)
        await owner.open()
        if is_alone(config):
            client: Any = loaded.client
            client.watch_for(lambda: owner.num_asked)
    except BaseException:
        await loaded.client.close()
        raise
    return loaded._replace(app=owner)


async def _load_several(config: Config, display: PhaseDisplay) -> FirstModel:
    """Loads the first of several models. Raises StartupError."""
    start = importlib.import_module("tureen.multi_model.start")
    launcher = await start.start(config, display)
    first = launcher.fleet.default
    return FirstModel(first.client, launcher.app, launcher.path_of(first), launcher.others)


def _url(config: Config, listener: socket.socket) -> str:
    """Returns where the server listens, as curl takes it."""
    if config.uds is not None:
        return "http://localhost"
    host, port = listener.getsockname()[:2]
    host = ON_ALL.get(host, host)
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _import_shell() -> ModuleType:
    """Imports what runs the application, and the application."""
    importlib.import_module("tureen.http.server")
    return importlib.import_module("tureen.app.application")


def _credentials(config: Config) -> str:
    """Returns the options with which curl gets in; shows no key."""
    options = [
        (config.uds, f"--unix-socket '{config.uds}'"),
        (config.tls_cert, "--cacert CA.pem"),
        (config.tls_ca, "--cert CLIENT.pem --key CLIENT.key.pem"),
        (config.api_key or config.api_key_file, "-H 'Authorization: Bearer KEY'"),
    ]
    return "".join(f" {option}" for setting, option in options if setting is not None)
