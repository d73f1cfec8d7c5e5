"""The way of one plain /generate through the package: through which files it goes, and in which order."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from byte_tokenizer import make_byte_tokenizer
from exchange import Exchange
from fake_engine import make_engine
from simulated_engine import Faults, Surroundings
from virtual_time import Clock, VirtualLoop, virtual_time

import tureen
from tureen.app.application import build_app
from tureen.config import Config

PACKAGE = f"{Path(tureen.__file__).parent}/"
BODY = {"text": "say:hey", "sampling_params": {"temperature": 0}}
"""Four steps of the engine: one for the prompt, which draws the first letter, two letters, the end."""


class Walk:
    """Records, as a profiler of this thread, through which files of the package control goes.

    `path` holds a file's name each time a function of it is entered, or gone on with, straight after one of another
    file. Returns are not recorded: whoever reads the code follows calls.
    """

    def __init__(self) -> None:
        self.path: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            name = name.removeprefix(PACKAGE)
            if not self.path or self.path[-1] != name:
                self.path.append(name)

    @property
    def files(self) -> list[str]:
        """Files of the package in the order in which they were entered first."""
        return list(dict.fromkeys(self.path))


def walk() -> Walk:
    """Sends BODY twice, through application and engine in one thread on a virtual clock, and records the second."""
    clock, chance = Clock(), random.Random(1)
    with virtual_time(clock, chance):
        loop = VirtualLoop(clock, chance)
        loop._ready.draw = lambda count: 0
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(_generate(loop, chance))


async def _generate(loop: VirtualLoop, chance: random.Random) -> Walk:
    config = Config()
    around = Surroundings(lambda progress: make_engine(config, progress=progress), loop, Faults(), chance, _no_check)
    client = around.connect()
    await client.start()
    app = build_app(client, make_byte_tokenizer(), config)
    await _exchange(app)
    await asyncio.sleep(1)
    recorder, before = Walk(), sys.getprofile()
    gc.disable()  # finalisers may be of any test before
    sys.setprofile(recorder)
    try:
        answer = await _exchange(app)
    finally:
        sys.setprofile(before)
        gc.enable()
    assert answer.status == 200, answer.text
    assert '"hey"' in answer.text, answer.text
    await app.state.server.common.close()
    await client.close()
    return recorder


async def _exchange(app: Any) -> Exchange:
    exchange = Exchange(app, "POST", "/generate", BODY)
    await exchange.wait()
    return exchange


def _no_check(host: object) -> None:
    """Whether the books balance is asked by the simulations."""
