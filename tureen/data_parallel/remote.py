"""The front's side of an engine on another machine: connects, checks what is there, and comes back after a break."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from tureen import errors
from tureen.contract.types import ControlCall, EngineInfo, EngineReady, EngineRole, FromEngine, Submit, ToEngine
from tureen.data_parallel.handshake import MAX_GREETING_BYTES, RESTART, GreetingRefusal, ModelDigests, Welcome, hello
from tureen.data_parallel.replica import OnTurn, ReplicaClient
from tureen.log import get_logger
from tureen.sandbox.framing import MAX_MESSAGE_BYTES, framed
from tureen.serving.client import ReplicaFacts
from tureen.serving.engine_socket import EngineSocket, read_frame
from tureen.serving.healing import Host, Lose
from tureen.serving.streams import Streams
from tureen.serving.watchdog import Sign

ADDRESS = re.compile(r"(?:tcp://)?(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:/@\s]+)):(?P<port>\d{1,5})/?")
CONNECT_S = 10.0
"""Seconds for a connection, its handshake and the first words."""

LOOK_S = 0.05
"""Seconds between two looks at what the owner of an engine says of it."""

KEEPALIVE_S, KEEPALIVE_PROBES = 5, 3
"""Seconds of silence after which the kernel asks whether the other machine is there, and how often it does."""

log = get_logger("replicas")


class EngineAddress(NamedTuple):
    """A host and port where an engine listens. Its text is what operators write."""

    host: str
    port: int
    name: str | None = None  # that its certificate is for; None = the host

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Says whether only this machine can be meant."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str, flag: str) -> EngineAddress:
    """Reads HOST:PORT, with or without tcp:// in front. Raises StartupError naming the flag."""
    match = ADDRESS.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65535:
        raise errors.StartupError(
            f"{flag} {errors.echo(text)}: must be tcp://HOST:PORT, with an IPv6 address in brackets"
        )
    return EngineAddress(match["v6"] or match["host"], int(match["port"]))


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel find out when the other machine is gone, or does not take what it is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_S * KEEPALIVE_PROBES * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class RemoteEngine:
    """An engine elsewhere: how it is reached, and what it must be. All connections to it share it."""

    def __init__(
        self, find: Callable[[], Awaitable[EngineAddress]], digests: ModelDigests | None, context: ssl.SSLContext | None
    ) -> None:
        """find: returns where the engine listens now; raises OSError. digests: None where another front sees to it that
        the engine is what it must be, and says which one is. context: of TLS; None = without."""
        self.find = find
        self.digests = digests
        self.context = context
        self.engine_id = ""  # of the engine that is in the state that this front knows
        self.address = ""  # of an actor, as the front that owns it knows or tells; "" = it has none, or is none
        self.role: EngineRole = "both"  # as it said last


class RemoteHost:
    """A Host whose engine runs elsewhere, and goes on when the connection ends."""

    can_be_killed = True

    def __init__(self, place: RemoteEngine, receive: Callable[[FromEngine], None], lose: Lose) -> None:
        self._place = place
        self._receive = receive
        self._lose = lose
        self._socket = EngineSocket(self._hear, max_bytes=MAX_MESSAGE_BYTES)
        self._reading: asyncio.Task[None] | None = None
        self._address = self._weights = ""
        self.engine_id = ""

    async def start(self) -> None:
        """Connects. Raises OSError if nothing listens there, and StartupError if it is the wrong engine."""
        address = await self._place.find()
        self._address = str(address)
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    address.host,
                    address.port,
                    ssl=self._place.context,
                    server_hostname=None if self._place.context is None else address.name or address.host,
                )
                self._socket.open(writer)
                keep_alive(writer.get_extra_info("socket"))
                writer.write(framed(msgspec.msgpack.encode(hello())))
                welcome = await self._read_welcome(reader)
        except TimeoutError:
            raise OSError(f"{address} does not answer within {CONNECT_S:g} s") from None
        except ssl.SSLError as error:
            raise errors.StartupError(_tls_fault(address, error)) from None
        except OSError as error:
            hint = "" if address.name else "; start it there: tureen engine --listen"
            raise OSError(f"{address}: {error.strerror or error}{hint}") from None
        if self._is_elsewhere:
            raise OSError(f"{address}: the engine is at {self._place.address} by now")
        self.engine_id, self._weights, self._place.role = welcome.engine_id, welcome.weights, welcome.role
        self._reading = asyncio.create_task(self._read(reader))

    @property
    def _is_elsewhere(self) -> bool:
        """Says whether the owner has told another address than the one that was connected to."""
        return self._place.address not in ("", self._address)

    def leave_old_address(self) -> None:
        """Gives the connection up where the owner says that the engine is elsewhere now."""
        if self._reading is not None and self._is_elsewhere:
            self._reading.cancel()
            self._lose(f"the engine is no longer at {self._address}", is_suspicious=False)

    async def _read_welcome(self, reader: asyncio.StreamReader) -> Welcome:
        """Raises StartupError where the engine is another one than the front needs."""
        try:
            answer = msgspec.msgpack.decode(
                await read_frame(reader, MAX_GREETING_BYTES), type=Welcome | GreetingRefusal
            )
        except (msgspec.DecodeError, OSError) as error:
            if isinstance(error, ssl.SSLError | ConnectionError | TimeoutError):
                raise
            raise errors.StartupError(f"{self._address}: the peer is not a tureen engine") from None
        except asyncio.IncompleteReadError:
            hint = "; it may need certificates: --replica-tls-cert"
            if self._place.context is not None:
                hint = "; it may not accept this server's certificate (--replica-tls-cert)"
            raise errors.StartupError(f"{self._address}: it closed the connection immediately{hint}") from None
        if isinstance(answer, GreetingRefusal):
            raise errors.StartupError(f"{self._address} refuses this server: {answer.message}")
        if answer.engine_id == self._place.engine_id:
            return answer  # it is what it was, or has the weights that this server gave it
        expected = {} if self._place.digests is None else msgspec.structs.asdict(self._place.digests)
        for name, own in expected.items():
            other = getattr(answer, name)
            if other != own:
                raise errors.StartupError(
                    f"{self._address} has another model: the digest of its {name} is {other}, here it is {own}; give "
                    "both the same --model-path and --tokenizer-path, and start an engine again that was given other "
                    "weights"
                )
        return answer

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Submit) and message.arrived_s is not None:
            age_s = time.monotonic() - message.arrived_s  # the other machine has another clock
            message = msgspec.structs.replace(message, arrived_s=age_s)
        self._socket.send(message)

    def sign(self) -> Sign:
        return Sign(self._socket.ask(), 0.0)

    @property
    def has_ended(self) -> bool:
        """Says whether the connection is there no more."""
        return self._reading is None or self._reading.done()

    async def close(self, *, at_once: bool) -> None:
        """Closes the connection. The engine ends what it does for this front, and stays."""
        if self._reading is not None:
            self._reading.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await self._socket.close()

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, EngineReady):  # times of files on another machine tell nothing; there are digests
            message = EngineReady(msgspec.structs.replace(message.info, files=(), weights=self._weights))
        self._receive(message)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            await self._socket.read(reader)
        except (asyncio.IncompleteReadError, OSError) as error:
            reason = f": {error.strerror or error}" if isinstance(error, OSError) else ""
            self._lose(f"the connection to {self._address} has ended{reason}", is_suspicious=False)
        except Exception as error:  # an edge: an engine whose messages are not read is lost
            log.exception("%s was not understood", self._address)
            self._lose(f"{self._address} was not understood: {type(error).__name__}")


class RemoteClient(ReplicaClient):
    """The client of a replica elsewhere. An engine that was there before the connection broke has kept its state."""

    def __init__(
        self,
        place: RemoteEngine,
        on_turn: OnTurn,
        *,
        watchdog_timeout_s: float,
        freeze_grace_s: float,
        streams: Streams | None = None,
    ) -> None:
        def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Lose) -> RemoteHost:
            return RemoteHost(place, receive, lose)

        super().__init__(
            make_host,
            on_turn,
            watchdog_timeout_s=watchdog_timeout_s,
            freeze_grace_s=freeze_grace_s,
            streams=streams,
        )
        self._place = place

    @property
    def engine_id(self) -> str:  # type: ignore[override]
        return self._place.engine_id

    @property
    def role(self) -> EngineRole:  # type: ignore[override]
        return self._place.role

    @property
    def address(self) -> str:  # type: ignore[override]
        return self._place.address

    def follow(self, facts: ReplicaFacts) -> None:
        self._place.engine_id, self._place.address = facts.engine_id, facts.address
        if isinstance(self._host, RemoteHost):
            self._host.leave_old_address()
        super().follow(facts)

    def restart(self, reason: str) -> None:
        if self._host is not None:
            self._host.send(ControlCall(0, RESTART))
        super().restart(reason)

    async def _restore(self, host: Host, info: EngineInfo) -> None:
        assert isinstance(host, RemoteHost)
        if self._place.digests is None:
            await self._wait_until_known(host)
        elif host.engine_id != self._place.engine_id:
            await super()._restore(host, info)
            self._place.engine_id = host.engine_id

    async def _wait_until_known(self, host: RemoteHost) -> None:
        """Waits until the front that owns the engine says that it is in the state that it is to be in."""
        while host.engine_id != self._place.engine_id:
            if host.has_ended:
                raise errors.StartupError("the connection has ended before the engine was in its state")
            await asyncio.sleep(LOOK_S)


async def why_absent(place: RemoteEngine) -> str:
    """Returns why an engine cannot be reached; "" where it can. Raises StartupError where the wrong one is there."""

    def hear(_: FromEngine) -> None:
        """Does nothing: it is only looked at."""

    def lose(reason: str, *, is_suspicious: bool = True) -> None:
        """Does nothing."""

    host = RemoteHost(place, hear, lose)
    try:
        await host.start()
    except OSError as error:
        return str(error)
    finally:
        await host.close(at_once=True)
    return ""


def _tls_fault(address: EngineAddress, error: ssl.SSLError) -> str:
    """Returns what went wrong in a handshake, for an operator."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{address}: its certificate is not accepted: {error.verify_message} (--replica-tls-ca)"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason:
        return f"{address} may not accept this server's certificate (--replica-tls-cert): {reason}"
    return f"{address} does not speak TLS correctly: {reason}; its flags --tls-cert, --tls-key, --tls-ca turn it on"
