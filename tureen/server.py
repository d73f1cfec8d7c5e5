"""`tureen serve`: bind, load, answer, drain."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable

from tureen.api.app import build_app
from tureen.api.server import Server, bind
from tureen.build import connect, find_model
from tureen.config import Config
from tureen.errors import StartupError
from tureen.log import set_up_logging
from tureen.terminal import PhaseDisplay, banner

SWITCH_INTERVAL_S = 0.001
"""How long the engine's thread may keep the interpreter from the event loop."""


def serve(config: Config) -> int:
    """Run until a signal. Returns the exit status: 0 after a drain, 1 when the engine died. Raises StartupError."""
    set_up_logging(config.log_level, config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=_fastest_event_loop()) as runner:
        return runner.run(_serve(config))


def _fastest_event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where there is one for this platform; None = asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


async def _serve(config: Config) -> int:
    started = time.monotonic()
    with bind(config) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        with PhaseDisplay() as display:
            model = await asyncio.to_thread(find_model, config, progress=display)
            client = await connect(config, model, progress=display)
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the server; collections need not look at it
        app = build_app(client, model.tokenizer, config)

        def ready() -> None:
            print(banner(client.info, url, time.monotonic() - started), file=sys.stderr, flush=True)  # noqa: T201

        server = Server(app, config, ready)
        await server.serve(sockets=[listener])
        failure = client.failure
        await client.close()
    if failure is not None:
        raise StartupError(f"the engine died: {failure}")
    return 0
