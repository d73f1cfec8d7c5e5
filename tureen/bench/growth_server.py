"""A server over engines without a model, whose steps sleep as if a GPU computed them.

Its arguments are FRONTS REPLICAS STEP_MS. It prints its port, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from functools import partial

from tureen.api_workers.owner import Fronts
from tureen.api_workers.start import DOOR, SharedClient, more_listeners
from tureen.app.application import build_app
from tureen.bench.overhead import CAPACITY, fake_info
from tureen.build import find_model
from tureen.config import Config
from tureen.contract.types import EngineInfo
from tureen.data_parallel.router import Router
from tureen.data_parallel.start import make_client
from tureen.engine.engine import Engine
from tureen.http.server import ServedApp, Server
from tureen.log import Progress, no_progress
from tureen.media.loader import MediaLoader
from tureen.runner.fake import FakeRunner
from tureen.server import SWITCH_INTERVAL_S, fastest_event_loop
from tureen.serving.client import EngineClient
from tureen.serving.process import ProcessClient
from tureen.temporary_folder import TemporaryFolder
from tureen.text.tokenizer import Tokenizer

STEP_MS = "TUREEN_BENCH_STEP_MS"
"""The environment variable with the milliseconds of a step, from which the engine's process has them."""

ENGINE, MODEL = "tureen.bench.growth_server:make_engine", "tureen.bench.growth_server:model_of"


def make_engine(config: Config, *, progress: Progress = no_progress) -> tuple[Engine, EngineInfo]:
    """Makes an engine without a model. Raises StartupError where there is no tokenizer."""
    progress("fake model", 1, 1)
    runner = FakeRunner(CAPACITY, step_s=float(os.environ[STEP_MS]) / 1000)
    return Engine(runner, find_model(config).tokenizer, eos_token_ids=()), fake_info()


def model_of(config: Config) -> tuple[Tokenizer, MediaLoader | None]:
    """Returns the tokenizer, for a front; nothing loads pictures."""
    return find_model(config).tokenizer, None


async def _connect(config: Config, num_replicas: int, door: str) -> EngineClient:
    """Starts the engines."""
    if num_replicas > 1:
        router = Router()
        await router.start([partial(make_client, config, ENGINE)] * num_replicas)
        return router
    client = SharedClient(ENGINE, config, door) if config.api_workers > 1 else ProcessClient(ENGINE, config)
    await client.start()
    return client


async def _serve(num_fronts: int, num_replicas: int) -> None:
    config = Config(api_workers=num_fronts, log_level="warning")
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as at_end:
        folder = at_end.enter_context(contextlib.closing(TemporaryFolder("fronts"))).path
        client = await _connect(config, num_replicas, str(folder / DOOR))
        app: ServedApp = build_app(client, find_model(config).tokenizer, config)
        if num_fronts > 1:
            fronts = Fronts(config, folder, more_listeners(listener, num_fronts - 1), app, factory=MODEL)  # type: ignore[arg-type]
            await fronts.open()
            app = fronts
        port = listener.getsockname()[1]
        server = Server(app, config, lambda: print(port, flush=True))  # noqa: T201 - what the bench reads
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving
        await client.close()


def main() -> None:
    """Runs the server until its standard input ends."""
    os.environ[STEP_MS] = sys.argv[3]
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=fastest_event_loop()) as runner:
        runner.run(_serve(int(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
