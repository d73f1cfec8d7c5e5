"""The process groups by which trainers broadcast weights: processes of this server are the other ranks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from tureen.errors import Conflict, InvalidRequest, Unavailable, echo
from tureen.extras import is_installed, why_missing
from tureen.log import get_logger
from tureen.sandbox import child_process, framing

PROGRAM: Final = "tureen.runner.weight_group_child"
TIMEOUT_S: Final = 300.0
"""Seconds within which a trainer must join, and within which it must send each tensor."""
GRACE_S: Final = 30.0
"""Seconds for a process to start, and to say that a time-out has passed."""
MOST_GROUPS: Final = 8

log = get_logger("api")


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """A group that the server is to join."""

    name: str
    backend: str
    address: str
    port: int
    first_rank: int
    num_ranks: int  # of this server
    world_size: int

    def check(self) -> None:
        """Raise InvalidRequest for a group that the server cannot join."""
        if self.backend != "gloo":
            raise InvalidRequest(
                f"backend {echo(self.backend)} is not available: this server joins process groups by gloo, which works "
                "without GPUs. Make the trainer's group with backend gloo, or send the weights to "
                "/update_weights_from_safetensors",
                field="backend",
            )
        if not is_installed("torch"):
            raise InvalidRequest(
                f"process groups need torch: {why_missing('torch')}. Or send the weights to "
                "/update_weights_from_safetensors, which needs no torch",
                code="not_supported",
            )
        if self.first_rank < 1 or self.first_rank + self.num_ranks > self.world_size:
            raise InvalidRequest(
                f"rank_offset {self.first_rank}: this server has {self.num_ranks} ranks, which follow rank 0, the "
                f"trainer, and do not fit into world_size {self.world_size}; /get_world_size says how many there are",
                field="rank_offset",
            )


class WeightGroup:
    """The processes of this server in one group. The first writes what it receives; the others only take part."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._thread = ThreadPoolExecutor(1, "weight_group")  # it waits for minutes: those of others are few
        self._is_left = False
        self.turn = asyncio.Lock()
        """Held by the update that receives: the trainer broadcasts one after another."""

    async def join(self, membership: Membership) -> None:
        """Start the processes and join the group. Raise Unavailable if the trainer does not come."""
        host = f"[{membership.address}]" if ":" in membership.address else membership.address
        args = {
            "url": f"tcp://{host}:{membership.port}",
            "world_size": membership.world_size,
            "name": membership.name,
            "timeout_s": TIMEOUT_S,
        }
        try:
            await self._in_thread(self._start, membership.num_ranks)
            orders = [{"rank": membership.first_rank + index, **args} for index in range(membership.num_ranks)]
            await self._in_thread(self._call, "join", orders, time.monotonic() + TIMEOUT_S + GRACE_S)
        except OSError as error:
            raise _lost(f"it cannot be joined: {error}") from None

    async def receive(self, sizes: list[int], path: str) -> None:
        """Append to a file what the trainer broadcasts: tensors of these bytes. Raise Unavailable if it fails; the
        group is of no use then."""
        orders = [{"sizes": sizes, "path": path if index == 0 else ""} for index in range(len(self._connections))]
        until_s = time.monotonic() + TIMEOUT_S * (1 + len(sizes)) + GRACE_S
        try:
            await self._in_thread(self._call, "receive", orders, until_s)
        except OSError as error:
            raise _lost(str(error)) from None

    def close(self) -> None:
        """End the processes, which makes the trainer's calls fail instead of waiting."""
        for process in self._processes:
            process.kill()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        self._thread.shutdown(wait=False)
        self._is_left = True

    async def _in_thread(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function in this group's thread. Raise ConnectionError if the server has left the group."""
        if self._is_left:
            raise ConnectionError("another request has made the server leave it")
        await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _start(self, num_ranks: int) -> None:
        for _ in range(num_ranks):
            ours, theirs = socket.socketpair()
            self._connections.append(ours)
            with theirs:
                number = theirs.fileno()
                self._processes.append(child_process.start(PROGRAM, str(number), pass_fds=[number]))

    def _call(self, op: str, orders: list[dict[str, Any]], until_s: float) -> None:
        """Give each process its order, and wait for all. Raise OSError naming the first fault."""
        for connection, args in zip(self._connections, orders, strict=True):
            framing.send(connection, msgspec.msgpack.encode({"op": op, "args": args}), until_s=until_s)
        for connection in self._connections:
            reply = framing.receive(connection, until_s=until_s)
            if reply is None:
                raise ConnectionError("a process of the group has ended")
            fault = msgspec.msgpack.decode(reply, type=str)
            if fault:
                raise ConnectionError(fault)


class WeightGroups:
    """The groups of one model by name."""

    def __init__(self) -> None:
        self._groups: dict[str, WeightGroup] = {}

    async def join(self, membership: Membership) -> None:
        """Join a group. One of the same name is left first: its trainer has begun anew. Raise InvalidRequest, Conflict,
        Unavailable."""
        membership.check()
        self.leave(membership.name)
        if len(self._groups) >= MOST_GROUPS:
            raise Conflict(
                f"this server is in {MOST_GROUPS} groups already; leave one by /destroy_weights_update_group",
                code="too_many_groups",
            )
        group = self._groups[membership.name] = WeightGroup()
        try:
            await group.join(membership)
        except BaseException:
            group.close()
            if self._groups.get(membership.name) is group:
                del self._groups[membership.name]
            raise

    def find(self, name: str) -> WeightGroup:
        """Return a group. Raise InvalidRequest for an unknown one."""
        group = self._groups.get(name)
        if group is None:
            raise InvalidRequest(
                f"group_name {echo(name)}: this server is in no such group; join it by /init_weights_update_group",
                field="group_name",
            )
        return group

    def leave(self, name: str) -> bool:
        """Leave a group. Return whether there was one."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    @contextlib.contextmanager
    def left_at_fault(self) -> Iterator[None]:
        """Leave all groups if the block raises: the trainer broadcasts all the same, and what it sends next would be
        taken for something else."""
        try:
            yield
        except BaseException:
            self.drain()
            raise

    def start(self) -> None:
        """Do nothing: a group begins with a request."""

    def drain(self) -> None:
        """Leave all groups: a trainer that waits gets an error."""
        for name in list(self._groups):
            self.leave(name)

    async def close(self) -> None:
        """Leave all groups."""
        self.drain()


def _lost(why: str) -> Unavailable:
    """Return the error for a group that failed. Its processes are ended, so that the trainer does not wait."""
    log.warning("a process group of a trainer failed: %s", why)
    return Unavailable(
        f"the process group failed, and the server has left it: {why[:200]}. Nothing has changed; join the group again "
        "by /init_weights_update_group",
        code="group_lost",
        retry_after_s=1,
    )
