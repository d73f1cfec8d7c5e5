"""Runs `tureen engine`: loads a model, and serves the fronts that connect."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Callable

from tureen.build import find_model
from tureen.config import Config
from tureen.contract.types import EngineRole, FromEngine
from tureen.data_parallel.engine_server import EngineServer
from tureen.data_parallel.handshake import digests_of
from tureen.data_parallel.remote import EngineAddress, parse_address
from tureen.data_parallel.start import FACTORY, with_room
from tureen.errors import StartupError
from tureen.http.tls import load_context
from tureen.log import Progress, get_logger, set_up_logging, warn_of_root
from tureen.serving.child import BuildOrder
from tureen.serving.process import ProcessHost
from tureen.terminal import PhaseDisplay

log = get_logger("replicas")


def serve_engine(config: Config, listen: str, role: EngineRole) -> int:
    """Serves fronts until a signal. Raises StartupError."""
    if role != "both" and config.kv_disk is None:
        raise StartupError(
            f"--role {role} needs --kv-disk, the folder of handed-over prompts; give all engines the same",
            field="kv_disk",
        )
    set_up_logging(config.log_level, config.log_format)
    address = parse_address(listen, "--listen")
    context = engine_context(config, address)
    warn_of_root()
    return asyncio.run(_serve(config, address, context, role))


def engine_context(config: Config, address: EngineAddress) -> ssl.SSLContext | None:
    """Makes the TLS context of an engine that listens there; None = without, on this machine only. Raises
    StartupError."""
    context = load_context(config)
    if context is None and not address.is_loopback:
        raise StartupError(
            f"--listen {address}: any client that reaches an engine controls it, so outside this machine an engine "
            "needs certificates: give --tls-cert, --tls-key and --tls-ca, or listen on 127.0.0.1"
        )
    if context is not None and context.verify_mode is not ssl.CERT_REQUIRED:
        raise StartupError(
            "--tls-cert without --tls-ca: an engine needs to know which certificates to accept; give --tls-ca"
        )
    return context


async def _serve(config: Config, address: EngineAddress, context: ssl.SSLContext | None, role: EngineRole) -> int:
    stopped = asyncio.Event()
    with PhaseDisplay() as display:
        server = await start_engine(config, address, context, display, role)
        await server.engine.start(display)
    for number in (signal.SIGINT, signal.SIGTERM):  # until now, a signal ends the process
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    log.info("the engine is ready; servers reach it at %s", server.address)
    await stopped.wait()
    await server.close()
    return 0


async def start_engine(
    config: Config,
    address: EngineAddress,
    context: ssl.SSLContext | None,
    progress: Progress,
    role: EngineRole = "both",
) -> EngineServer:
    """Finds the model and listens. The engine is to be started after that. Raises StartupError."""
    model = await asyncio.to_thread(find_model, config, progress=progress)
    digests = await asyncio.to_thread(digests_of, model)
    own = with_room(config)

    def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Callable[[str], None]) -> ProcessHost:
        return ProcessHost(BuildOrder(FACTORY, own, epoch), receive, lose)

    server = EngineServer(make_host, digests, config, role)
    try:
        await server.listen(address, context)
    except OSError as error:
        raise StartupError(f"--listen {address}: cannot listen there: {error.strerror or error}") from None
    return server
