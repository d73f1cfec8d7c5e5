"""A server of several models in one thread, on a virtual clock: engines that are stepped by tasks, and loads that take
as long as a seed says."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from byte_tokenizer import make_byte_tokenizer
from exchange import Exchange
from fake_engine import make_engine
from simulated_engine import Faults, Surroundings
from virtual_time import VirtualLoop

from tureen.build import Model
from tureen.config import Config
from tureen.errors import StartupError
from tureen.log import no_progress
from tureen.multi_model.fleet import Fleet
from tureen.multi_model.member import Member
from tureen.multi_model.start import Launcher
from tureen.serving.healing import HealingClient


class SimulatedLauncher(Launcher):
    """Starts engines over the fake runner. `sizes`: bytes of each model; `broken`: names of those that do not start."""

    def __init__(self, loop: VirtualLoop, chance: random.Random, sizes: dict[str, int], faults: Faults) -> None:
        super().__init__(Config(), no_progress)
        self.sizes = dict(sizes)
        self.broken: set[str] = set()
        self.launch_s = 1.0
        self.around: dict[str, Surroundings] = {}
        self._loop, self._chance, self._faults = loop, chance, faults

    async def measure(self, member: Member, share_bytes: int) -> int:
        return self.sizes[member.name]

    def adopt(self, name: str) -> Member:
        if name not in self.sizes:
            raise StartupError(f"there is no model {name}")
        return _member(name)

    async def _find(self, member: Member) -> Model:
        return Model(None, make_byte_tokenizer())

    async def _connect(self, member: Member, model: Model) -> tuple[HealingClient, None]:
        await asyncio.sleep(self.launch_s)
        if member.name in self.broken:
            raise StartupError(f"/secret/{member.name}.gguf is broken")

        def make(progress: Any) -> Any:
            engine, info = make_engine(member.config, progress=progress)
            return engine, type(info)(
                **{name: getattr(info, name) for name in info.__struct_fields__} | {"model_name": member.name}
            )

        around = Surroundings(make, self._loop, self._faults, self._chance, lambda _: None)
        self.around[member.name] = around
        client = around.connect()
        await client.start()
        return client, None


def _member(name: str, **settings: Any) -> Member:
    return Member(Config(model_path=f"/models/{name}.gguf", served_model_name=name, **settings), name)


class SimulatedFleet:
    """The application over such engines."""

    def __init__(
        self,
        loop: VirtualLoop,
        chance: random.Random,
        sizes: dict[str, int],
        limit: int,
        faults: Faults | None = None,
        **settings: Any,
    ) -> None:
        self.launcher = SimulatedLauncher(loop, chance, sizes, faults or Faults())
        members = [_member(name, **settings) for name in sizes]
        self.fleet = self.launcher.fleet = WatchedFleet(members, limit, self.launcher)

    async def start(self) -> SimulatedFleet:
        await self.fleet.begin()
        self.app = self.launcher.app
        self.common = self.app.state.server.common
        self.common.lifecycle.start()
        return self

    def member(self, name: str) -> Member:
        return next(member for member in self.fleet.members if member.name == name)

    def send(self, path: str, **body: Any) -> Exchange:
        return Exchange(self.app, "POST", path, body)

    def generate(self, model: str | None, text: str, num_tokens: int = 40, **more: Any) -> Exchange:
        params = {"temperature": 0, "max_new_tokens": num_tokens}
        named = {} if model is None else {"model": model}
        return self.send("/generate", text=text, sampling_params=params, **named, **more)

    async def ask(self, method: str, path: str, body: Any = None) -> Exchange:
        exchange = Exchange(self.app, method, path, body)
        await exchange.wait()
        return exchange

    async def close(self) -> None:
        await self.common.close()
        await self.fleet.default.client.close()
        await asyncio.sleep(1)  # what was cancelled ends
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks that nobody ended: {left}"


class WatchedFleet(Fleet):
    """Notes the most memory that was in use, and sees that nobody's engine is taken away."""

    most_bytes = 0

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        unload = self.room.unload

        async def unload_watched(member: Member) -> None:
            assert not member.is_busy, "a model is unloaded while a request uses it"
            await unload(member)

        self.room.unload = unload_watched  # type: ignore[method-assign]

    async def _start(self, member: Member) -> None:
        assert member.standing == "unloaded", "a model is loaded twice"
        self.most_bytes = max(self.most_bytes, self.room.used_bytes + member.need_bytes)
        await super()._start(member)
