"""Runs one model in several processes, its ranks: this one is rank 0, the others are its children."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import weakref
from typing import Any

import msgspec
import torch

from tureen.config import Config
from tureen.contract.runner import Batch, Capacity, Masks, StepOutput
from tureen.devices.base import DeviceInfo
from tureen.devices.dtypes import default_dtype
from tureen.devices.groups import RankGroup
from tureen.errors import InvalidRequest, StartupError
from tureen.log import Progress, get_logger
from tureen.models.config import ModelConfig
from tureen.runner import loading
from tureen.runner.kv_pool import KvBytes, plan_capacity
from tureen.runner.model_runner import ModelRunner, make_sampler
from tureen.runner.parts import ForwardParts
from tureen.runner.rank_forward import RankFactory, RankForward, factory_of
from tureen.runner.rank_orders import RankCall, RankOrder, RankReply, RankStep, ToRank
from tureen.runner.torch_forward import refuse_native_settings
from tureen.sampling.sampler import Sampler
from tureen.sampling.torch_arithmetic import TorchArithmetic
from tureen.sandbox import child_process, framing
from tureen.temporary_folder import TemporaryFolder
from tureen.weights.source import ModelSource, model_config

SHARED = frozenset({"load_adapter", "unload_adapter", "update_weights", "release_memory", "resume_memory", "forget"})
"""Operations of a runner that each rank does."""

REFUSED = {
    "weight": "give out weights: each rank has a part of them",
    "page_memory": "keep pages of the KV cache: each rank has a part of them",
    "kv_facts": "keep pages of the KV cache: each rank has a part of them",
}
"""Operations of a runner that ranks do not have, in words."""

END_TIMEOUT_S = 5.0
NOTICE_S = 1.0
"""Seconds after a broken exchange within which the end of the rank at fault is heard of."""

log = get_logger("runner")


class RankLost(Exception):
    """A rank has ended: its engine is lost."""


class Ranks:
    """The processes of the ranks 1, 2, …, as rank 0 sees them."""

    def __init__(self, group: RankGroup, field: str) -> None:
        """field: the setting of their number."""
        self._field = field
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankReply)
        self._has_ended = threading.Event()
        self._why = ""
        self._group = group
        self._children: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        # Kept as long as they run: a rank may read the file after others have met, and NCCL does at the first exchange.
        self._folder = TemporaryFolder("ranks")
        self.store_path = str(self._folder.path / "ranks")

    def start(self, order: RankOrder) -> None:
        """Starts them; each gets the order with its own rank. Raises OSError."""
        for rank in range(1, self._group.size):
            self._start(msgspec.structs.replace(order, rank=rank))

    def await_start(self) -> None:
        """Waits until all have loaded their parts. Raises StartupError."""
        for number, connection in enumerate(self._connections, 1):
            reply = self._receive(connection)
            if reply.error:
                raise StartupError(f"rank {number}: {reply.error}", field=self._field)

    def tell(self, batch: Batch) -> None:
        """Has them compute a step. Raises RankLost."""
        self._send(RankStep(batch))

    def call(self, op: str, args: dict[str, Any]) -> None:
        """Has them do an operation, and waits. Raises RankLost where one cannot: they are no longer in one state."""
        self._send(RankCall(op, args))
        for number, connection in enumerate(self._connections, 1):
            reply = self._receive(connection)
            if reply.error:
                self._lose(f"rank {number} could not do {op}: {reply.error}")
        self.check()

    def check(self) -> None:
        """Raises RankLost when one has ended."""
        if self._why:
            raise RankLost(self._why)

    def explain(self, error: RuntimeError) -> Exception:
        """Returns the reason why an exchange failed: the end of a rank, or the error itself."""
        self._has_ended.wait(NOTICE_S)
        return RankLost(self._why) if self._why else error

    def close(self) -> None:
        """Ends them: each ends when its connection does."""
        self._why = self._why or "the engine was closed"
        for connection in self._connections:
            connection.close()
        for child in self._children:
            try:
                child.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._folder.close()

    def _start(self, order: RankOrder) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(ours)
        with theirs:
            child = child_process.start("tureen.runner.rank_child", str(theirs.fileno()), pass_fds=[theirs.fileno()])
        self._children.append(child)
        framing.send(ours, self._encoder.encode(order))
        watch = (weakref.ref(self), child, order.rank)
        threading.Thread(target=_watch, args=watch, name=f"rank {order.rank}", daemon=True).start()

    def _lose(self, why: str) -> None:
        """Notes that a rank is lost; who waits for it is let go. Called in any thread."""
        if self._why:
            return
        self._why = why
        log.warning("%s", why)
        self._has_ended.set()
        self._group.abort()

    def _send(self, message: ToRank) -> None:
        self.check()
        payload = self._encoder.encode(message)
        try:
            for connection in self._connections:
                framing.send(connection, payload)
        except OSError as error:
            self._has_ended.wait(NOTICE_S)
            raise RankLost(self._why or str(error)) from None

    def _receive(self, connection: socket.socket) -> RankReply:
        """Waits for the answer of a rank; one that ends has an error for an answer."""
        try:
            payload = framing.receive(connection)
        except OSError:
            payload = None
        if payload is None:
            self._has_ended.wait(NOTICE_S)
            return RankReply(self._why or "it has ended")
        return self._decoder.decode(payload)


class RankedRunner(ModelRunner):
    """The runner of an engine whose model is computed by several ranks, of which this is rank 0."""

    def __init__(
        self,
        parts: ForwardParts,
        sampler: Sampler,
        capacity: Capacity,
        model: ModelConfig,
        ranks: Ranks,
        factory: type[RankFactory],
    ) -> None:
        super().__init__(parts.assemble(), sampler, capacity, model, parts)
        self._refused = REFUSED | factory.refused
        self._flag = _flag(factory)
        self._ranks = ranks
        self.check = ranks.check

    def run(self, batch: Batch, masks: Masks | None = None) -> StepOutput:
        """Computes a step, see ModelRunner.run. Raises RankLost."""
        self._ranks.check()
        try:
            return super().run(batch, masks)
        except RuntimeError as error:
            raise self._ranks.explain(error) from error

    def call(self, op: str, **args: object) -> object:
        if op in self._refused:
            raise InvalidRequest(f"{self._flag}: this server cannot {self._refused[op]}", code="not_supported")
        self._ranks.check()
        if isinstance(self._forward, RankForward):
            self._forward.read_rest()
        value = super().call(op, **args)
        if op in SHARED:
            self._ranks.call(op, args)
        return value

    def close(self) -> None:
        super().close()
        self._ranks.close()


def load_runner(source: ModelSource, config: Config, device: DeviceInfo, progress: Progress) -> ModelRunner:
    """Loads a model that is on disk into as many ranks as the settings say. Raises StartupError."""
    kind, shape = factory_of(config), loading.describe(model_config(source))
    size = getattr(config, kind.field)
    fault = kind.why_not(shape, size)
    if fault:
        raise StartupError(f"{_flag(kind)} {size}: {fault}", field=kind.field)
    _require_devices(device, kind, size)
    device = _with_threads(device, config)
    torch.set_num_threads(device.num_threads)
    dtype = default_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    refuse_native_settings(config, dtype)
    attention = kind.find_attention(config, shape, device, dtype)
    capacity = _capacity(config, shape, device, dtype)
    group = RankGroup(0, size)
    ranks = Ranks(group, kind.field)
    with contextlib.ExitStack() as undo:
        undo.callback(ranks.close)
        factory = kind(device, dtype, shape, capacity, attention, group, progress=progress, tell=ranks.tell)
        order = RankOrder(
            rank=0,
            config=config,
            name=source.name,
            path=str(source.path),
            format=source.format,
            mmproj=None if source.mmproj.path is None else str(source.mmproj.path),
            device=device.type,
            num_threads=device.num_threads,
            capacity=capacity,
            store_path=ranks.store_path,
        )
        ranks.start(order)
        parts = ForwardParts(factory, source, config)
        ranks.await_start()
        group.join(order.store_path, device, config.watchdog_timeout_s)
        sampler = make_sampler(config, shape.vocab_size, TorchArithmetic(torch.device(device.name)))
        undo.pop_all()
    return RankedRunner(parts, sampler, capacity, shape, ranks, kind)


def _flag(kind: type[RankFactory]) -> str:
    return f"--{kind.field.replace('_', '-')}"


def _require_devices(device: DeviceInfo, kind: type[RankFactory], size: int) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise StartupError(
            f"{_flag(kind)} {size}: each rank needs a GPU, and there are {torch.cuda.device_count()}; use no "
            "more, or --device cpu",
            field=kind.field,
        )


def _with_threads(device: DeviceInfo, config: Config) -> DeviceInfo:
    """Returns the device with the threads of one rank: as asked for, else its part of them, or all where ranks wait for
    each other."""
    if config.num_threads is not None or device.type == "cuda":
        return device
    return msgspec.structs.replace(device, num_threads=max(1, device.num_threads // config.tensor_parallel_size))


def _capacity(config: Config, shape: ModelConfig, device: DeviceInfo, dtype: torch.dtype) -> Capacity:
    """Plans the KV cache: on a CPU all ranks share its memory, GPUs have each their own."""
    kind = factory_of(config)
    size = getattr(config, kind.field)
    groups = [RankGroup(rank, size) for rank in range(size)]
    token_bytes = [kind.token_bytes(shape, dtype, group) for group in groups]
    weights = [kind.weight_bytes(shape, dtype, device, group) for group in groups]
    taken = max if device.type == "cuda" else sum
    loading.require_memory(taken(weights), "all ranks together" if taken is sum else "one rank", device)
    kv_bytes = KvBytes(taken(token_bytes))
    return plan_capacity(config, shape, kv_bytes=kv_bytes, weight_bytes=taken(weights), device=device)


def _watch(ranks: weakref.ref[Ranks], child: subprocess.Popen[bytes], rank: int) -> None:
    """Waits for a rank's end, and tells it."""
    status = child.wait()
    owner = ranks()
    if owner is not None:
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        owner._lose(f"rank {rank} {how}")
