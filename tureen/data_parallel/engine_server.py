"""The other machine's side: one engine in a process, which is replaced when it is lost, and the fronts that use it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tureen import __version__, errors
from tureen.config import Config
from tureen.contract.types import (
    Abort,
    CallResult,
    Close,
    ControlCall,
    EngineFailed,
    EngineReady,
    EngineRole,
    FromEngine,
    OutputDelta,
    StepReport,
    Submit,
    ToEngine,
)
from tureen.data_parallel.control_calls import checked
from tureen.data_parallel.handshake import (
    MAX_GREETING_BYTES,
    RESTART,
    GreetingRefusal,
    Hello,
    ModelDigests,
    Welcome,
    contract_digest,
)
from tureen.data_parallel.remote import CONNECT_S, EngineAddress, keep_alive
from tureen.data_parallel.replica import ReplicaClient
from tureen.engine.finish import failed
from tureen.log import get_logger
from tureen.sandbox.framing import MAX_MESSAGE_BYTES, framed
from tureen.serving.child import PING
from tureen.serving.dry_run import dry_run
from tureen.serving.engine_socket import read_frame
from tureen.serving.healing import MakeHost, State
from tureen.serving.journal import Journal
from tureen.serving.peer_credentials import is_trusted
from tureen.serving.pixels import PixelReceiver, ToChild
from tureen.serving.streams import Streams
from tureen.struct_warm_up import warm_up_structs
from tureen.weights.source import open_model, weights_digest

OTHER_USER = (
    "without TLS, an engine accepts servers of its own user and root only, and this server belongs to another or an "
    "unknown user; give certificates to both (--replica-tls-cert)"
)
MAX_FRONTS = 64
MAX_UNSENT_BYTES = 64 << 20
"""Bytes that a front may leave untaken before its connection is closed."""

log = get_logger("replicas")


class RelayedStreams(Streams):
    """Streams of an engine whose requests are followed elsewhere."""

    num_relayed = 0  # requests of fronts that have not ended

    @property
    def is_waiting(self) -> bool:
        return super().is_waiting or self.num_relayed > 0


class SharedEngine(ReplicaClient):
    """The client of an engine whose requests are those of several fronts, which resume them themselves. What operators
    do goes through `call`, and a new engine is brought to the same state."""

    def __init__(
        self,
        make_host: MakeHost,
        on_turn: Callable[[State, State], None],
        on_report: Callable[[StepReport], None],
        *,
        watchdog_timeout_s: float,
        freeze_grace_s: float,
    ) -> None:
        super().__init__(make_host, on_turn, watchdog_timeout_s=watchdog_timeout_s, freeze_grace_s=freeze_grace_s)
        self._on_report = on_report
        self._streams: RelayedStreams = RelayedStreams()

    @property
    def reason(self) -> str:
        """Returns why the engine is in its state."""
        return self._health.reason

    def send(self, message: ToEngine) -> None:
        """Sends a front's message to the engine; does nothing while there is none."""
        if self._host is not None and not self._is_starting:
            self._host.send(message)

    def forget_calls(self) -> None:
        """Has the next engine be as at the start."""
        self._streams.journal = Journal()

    @property
    def num_relayed(self) -> int:
        """The number of fronts' requests that have not ended."""
        return self._streams.num_relayed

    def count(self, change: int) -> None:
        """Adds to the number of requests of fronts that run; a negative number takes away."""
        self._streams.num_relayed += change

    def _hear(self, epoch: int, message: FromEngine) -> None:
        super()._hear(epoch, message)
        if epoch == self._epoch and isinstance(message, StepReport):
            self._on_report(message)


class EngineServer:
    """One engine, and the fronts that are connected to it."""

    def __init__(
        self,
        make_host: MakeHost,
        digests: ModelDigests,
        config: Config,
        role: EngineRole = "both",
    ) -> None:
        """config: the engine's own settings. Their model_path follows the weights."""
        self.engine = SharedEngine(
            make_host,
            self._hear_turn,
            self._hand_out,
            watchdog_timeout_s=config.watchdog_timeout_s,
            freeze_grace_s=config.freeze_grace_s,
        )
        self._digests_at_start = self._digests = digests
        self._role = role
        self._config_at_start = self.config = config
        self._has_tls = False
        self._engine_id = secrets.token_hex(8)
        self._fronts: dict[int, Front] = {}
        self._num_fronts = 0  # ever
        self._adapters: dict[str, str] | None = None  # name -> path, once a front has changed them
        self._server: asyncio.Server | None = None
        self._is_asked = False  # the engine ends because an operator wants it

    async def listen(self, address: EngineAddress, context: ssl.SSLContext | None) -> None:
        """Takes fronts from now on: with a certificate, or without TLS of this user and root on this machine only.
        Raises OSError."""
        self._has_tls = context is not None
        warm_up_structs()
        timeout_s = None if context is None else CONNECT_S
        self._server = await asyncio.start_server(
            self._take_front, address.host, address.port, ssl=context, ssl_handshake_timeout=timeout_s
        )

    @property
    def address(self) -> EngineAddress:
        """Returns where it listens."""
        assert self._server is not None
        return EngineAddress(*self._server.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        """Ends the connections and the engine."""
        if self._server is not None:
            self._server.close()
        for front in list(self._fronts.values()):
            front.end()
        await self.engine.close()

    async def _take_front(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection from its first word to its end."""
        peer = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        try:
            keep_alive(writer.get_extra_info("socket"))
            async with asyncio.timeout(CONNECT_S):
                hello = msgspec.msgpack.decode(await read_frame(reader, MAX_GREETING_BYTES), type=Hello)
            is_known = self._has_tls or is_trusted(writer.get_extra_info("socket"))
            fault = self._fault_of(hello) if is_known else OTHER_USER
            answer = (
                GreetingRefusal(fault)
                if fault
                else Welcome(self._engine_id, role=self._role, **msgspec.structs.asdict(self._digests))
            )
            writer.write(framed(msgspec.msgpack.encode(answer)))
            if fault:
                log.warning("front %s is refused: %s", peer, fault)
                return
            await self._serve_front(reader, writer, peer)
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            pass  # it has left, or never said who it is
        except msgspec.DecodeError as error:
            log.warning("front %s sent an invalid message and is refused: %s", peer, error)
        finally:
            writer.close()

    def _fault_of(self, hello: Hello) -> str:
        """Says why a front may not stay; "" where it may."""
        if hello.contract != contract_digest():
            return (
                f"this engine is of tureen {__version__}, that server of {hello.version}, and their protocols differ; "
                "install the same version on both"
            )
        return f"{MAX_FRONTS} servers already use this engine" if len(self._fronts) >= MAX_FRONTS else ""

    async def _serve_front(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        self._num_fronts += 1
        front = self._fronts[self._num_fronts] = Front(self, self._num_fronts, writer)
        log.info("front %s is connected", peer)
        try:
            if self.engine.health.state in ("healthy", "suspect"):
                self._greet(front)
            while True:
                front.receive(await read_frame(reader, MAX_MESSAGE_BYTES))
        finally:
            del self._fronts[front.number]
            front.leave()
            log.info("front %s is gone", peer)

    def _greet(self, front: Front) -> None:
        """Tells a front that the engine takes requests."""
        info = self.engine.info
        if self._adapters is not None:
            info = msgspec.structs.replace(info, adapters=self._adapters)
        front.say(EngineReady(info))

    def _hear_turn(self, before: State, state: State) -> None:
        """Tells the fronts that the engine is lost, or is there."""
        if state in ("replacing", "down") and before not in ("replacing", "down"):
            for front in list(self._fronts.values()):
                if not self._is_asked:
                    front.say(EngineFailed(self.engine.reason))
                front.end()
            self._is_asked = False
        elif state == "healthy" and before in ("replacing", "down"):
            for front in self._fronts.values():
                self._greet(front)

    def _hand_out(self, report: StepReport) -> None:
        """Gives each front its part of a step."""
        shares: dict[int, list[OutputDelta]] = {number: [] for number in self._fronts}
        for delta in report.deltas:
            text, _, request_id = delta.id.partition("/")
            if (number := int(text)) in shares:
                shares[number].append(msgspec.structs.replace(delta, id=request_id))
        for number, deltas in shares.items():
            self._fronts[number].take(StepReport(tuple(deltas), report.stats))

    def note_adapters(self, adapters: dict[str, str]) -> None:
        """Notes which adapters are loaded, for fronts that come later."""
        self._adapters = dict(adapters)

    async def update_weights(self, args: dict[str, Any]) -> object:
        """Gives the engine other weights, and notes which. A server that comes with others is refused, and adapters
        are read for this model. Raises TureenError."""
        value = await self.engine.call("update_weights", **args)
        path = args["path"]
        weights = ""  # no engine has these: the files may be gone by now
        with contextlib.suppress(OSError, errors.StartupError):
            weights = await asyncio.to_thread(lambda: weights_digest(open_model(Path(path))))
        self._digests = msgspec.structs.replace(self._digests, weights=weights)
        self.config = msgspec.structs.replace(self.config, model_path=path)
        return value

    async def let_go(self) -> None:
        """Ends a hold on new requests whose front has left without ending it."""
        with contextlib.suppress(errors.TureenError):  # another engine comes, without it
            await self.engine.call("let_go")

    def restart(self) -> None:
        """Replaces the engine by one without what operators did to it."""
        self._digests, self.config = self._digests_at_start, self._config_at_start
        self._engine_id, self._adapters, self._is_asked = secrets.token_hex(8), None, True
        self.engine.forget_calls()
        self.engine.restart("an operator is restarting it")


class Front:
    """One connection of a front. The engine knows its requests by the connection's number and their ids, so that no two
    fronts' are taken for each other, nor those of a connection that has ended."""

    def __init__(self, server: EngineServer, number: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self._server = server
        self._writer = writer
        self._live: set[str] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._has_hold = False  # on new requests, which it is to end
        self._pixel_receiver = PixelReceiver()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToChild)

    def receive(self, payload: bytes) -> None:
        """Does what a frame says. Raises msgspec.DecodeError."""
        if payload == PING:
            if self._server.engine.health.state != "suspect":  # else the front is to know that nothing answers
                self._write(PING)
            return
        message = self._pixel_receiver.receive(self._decoder.decode(payload))
        match message:
            case Submit(request, age_s):
                self._live.add(request.id)
                self._server.engine.count(1)
                arrived_s = None if age_s is None else time.monotonic() - age_s
                named = msgspec.structs.replace(request, id=self._named(request.id))
                self._server.engine.send(Submit(named, arrived_s))
            case Abort(request_id, reason):
                self._server.engine.send(Abort(self._named(request_id), reason))
            case ControlCall(_, op) if op == RESTART:
                self._server.restart()
            case ControlCall():
                task = asyncio.create_task(self._call(message))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case Close():
                self.end()

    def take(self, report: StepReport) -> None:
        """Passes on this front's part of a step."""
        ended = {delta.id for delta in report.deltas if delta.finish is not None} & self._live
        self._live -= ended
        self._server.engine.count(-len(ended))
        self.say(report)

    def say(self, message: FromEngine) -> None:
        """Sends a message, or gives up a front that takes nothing."""
        self._write(self._encoder.encode(message))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("a front takes nothing any more: its connection is closed")
            self._writer.transport.abort()

    def end(self) -> None:
        """Closes the connection, after what was said."""
        self._writer.close()

    def leave(self) -> None:
        """Ends what the engine does for this front."""
        for request_id in self._live:
            self._server.engine.send(Abort(self._named(request_id), "its server is gone"))
        self._server.engine.count(-len(self._live))
        self._live.clear()
        for task in self._calls:
            task.cancel()
        if self._has_hold:
            self._letting_go = asyncio.create_task(self._server.let_go())

    async def _call(self, call: ControlCall) -> None:
        if call.op == "hold":
            self._has_hold = True
        try:
            result = CallResult(call.number, await self._value_of(call))
            if call.op == "let_go":
                self._has_hold = False
        except errors.TureenError as error:
            result = CallResult(call.number, error=failed(error))
        except Exception as error:  # an edge: who has asked is to hear of it, whatever it is
            log.exception("operation %s failed", call.op)
            reason = f"the operation {call.op} failed at its engine: {type(error).__name__}: {error}"
            result = CallResult(call.number, error=failed(errors.RequestFailed(reason)))
        self.say(result)

    async def _value_of(self, call: ControlCall) -> Any:
        """Has the engine do what an operator wants, and notes what fronts that come later are to know of it."""
        args = checked(call.op, call.args, self._server.config.profile_dir)
        await dry_run(call.op, args, self._server.config)
        if call.op == "update_weights":  # it goes on if this front leaves
            return await asyncio.shield(self._server.update_weights(args))
        value = await self._server.engine.call(call.op, **args)
        if call.op in ("load_adapter", "unload_adapter") and isinstance(value, dict):
            self._server.note_adapters(value)
        return value

    def _named(self, request_id: str) -> str:
        return f"{self.number}/{request_id}"

    def _write(self, payload: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(framed(payload))
