"""Reads files in a child process before an engine that serves requests reads them: a dry run.

Reading a stranger's files may never end, or end the process, with the interpreter held. Then only the child is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tureen.config import Config
from tureen.config_facts import without_secrets
from tureen.engine.adapters import PATH_FIELD
from tureen.errors import InvalidRequest, Unavailable
from tureen.log import get_logger
from tureen.sandbox import child_process
from tureen.sandbox.expendable import BEGUN, OUT_OF_MEMORY
from tureen.sandbox.heartbeat import Patience, Pulse
from tureen.serving.watchdog import processor_s

PROGRAM: Final = "tureen.runner.dry_run_child"
FIELDS: Final = {
    "load_adapter": (PATH_FIELD, "invalid_adapter"),
    "load_model": ("model_path", "invalid_model_path"),
    "update_weights": ("model_path", "invalid_model_path"),
}
"""Operations that read files -> the field of a request that names the files, and the code of an error about them."""

PATIENCE = Patience(cpu_s=60.0, idle_s=120.0)
"""The limits on reading."""

START_PATIENCE = PATIENCE
"""The limits on the child's imports."""

MAX_WAIT_S = 120.0  # for the dry runs that began earlier
RETRY_S = 10
TICK_S = 0.02
END_S = 1.0  # for a killed child to be gone; one that waits for a disk takes longer
MAX_SAID: Final = 4000  # characters of what a child printed, in the log

log = get_logger("serving")
_turn = asyncio.Lock()
"""Held during a dry run: a child takes memory and processor time from the streams."""


async def dry_run(op: str, args: Mapping[str, Any], config: Config) -> None:
    """Reads the files that the operation `op` names. Does nothing for an operation that reads none.

    config: of the model that is served. Raises InvalidRequest if reading does not end, or ends the process; Unavailable
    if no process can be started. The engine finds all other faults.
    """
    if op not in FIELDS:
        return
    field, code = FIELDS[op]
    config = without_secrets(config)
    if args.get("load_format"):
        config = msgspec.structs.replace(config, load_format=args["load_format"])
    order = {"op": op, "path": args["path"], "config": msgspec.to_builtins(config)}
    fault = await read_in_child(order)
    if fault:
        log.warning("%s: nothing was loaded: reading %s %s", op, args["path"], fault)
        raise InvalidRequest(
            f"{field}: reading these files {fault}, in a separate process; nothing was loaded. Use files from a "
            "source that you trust",
            field=field,
            code=code,
        )


async def read_in_child(order: Mapping[str, Any]) -> str:
    """Returns what goes wrong when a child process does the order; "" = it ends.

    One child runs at a time. Raises Unavailable if its turn does not come in MAX_WAIT_S, or if it does not begin: no
    file is to blame.
    """
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            await _turn.acquire()
    except TimeoutError:
        raise Unavailable(
            f"this server reads the files of one request at a time, and earlier ones took {MAX_WAIT_S:g} s; try again "
            "later",
            retry_after_s=RETRY_S,
        ) from None
    try:
        return await _start_and_follow(json.dumps(order).encode())
    finally:
        _turn.release()


async def _start_and_follow(message: bytes) -> str:
    """Starts a child and sends it the message. Returns what went wrong. Raises Unavailable."""
    pipe = subprocess.PIPE
    try:
        child = child_process.start(PROGRAM, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
    except OSError as error:
        raise Unavailable(
            f"the system starts no process to read these files in ({error.strerror}); try again later"
        ) from None
    sending = asyncio.get_running_loop().run_in_executor(None, _send, child, message)
    try:
        await _await_begin(child)
        return await _outcome(child)
    finally:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(child.wait, END_S)
        await sending


def _send(child: subprocess.Popen[bytes], message: bytes) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as orders:  # broken: it has ended, its status says why
        orders.write(message)


async def _await_begin(child: subprocess.Popen[bytes]) -> None:
    """Waits until the child has imported its program. Raises Unavailable, and logs what the child printed, if it
    cannot."""
    assert child.stdout is not None
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, child.stdout)
    reading = asyncio.ensure_future(reader.read())  # until the child closes its output, or ends
    try:
        is_over = await _wait_for(reading.done, child, START_PATIENCE)
        said = reading.result() if is_over else b"it did not end its imports within the limits"
    finally:
        reading.cancel()
        transport.close()
    if said.endswith(BEGUN):
        return
    told = said.decode(errors="replace")[-MAX_SAID:].strip()
    log.error("python -m %s does not start reading files: %s", PROGRAM, told or "it printed nothing")
    raise Unavailable("the process that checks these files cannot run here; the server's log says why")


async def _outcome(child: subprocess.Popen[bytes]) -> str:
    """Waits for the child's end. Returns what went wrong."""
    if not await _wait_for(lambda: child.poll() is not None, child, PATIENCE):
        limits = f"{PATIENCE.cpu_s:g} s of processor time or {PATIENCE.idle_s:g} s in all"
        return f"did not end within {limits} (a slow disk can be the cause, too)"
    status = child.returncode
    if status == OUT_OF_MEMORY:
        return "needs more than half of the free memory"
    if status == -signal.SIGKILL:
        return "was ended by SIGKILL, which the system sends if memory is short"
    if status < 0:
        return f"was ended by {_signal_name(-status)}"
    return f"ended its process with status {status}" if status else ""


async def _wait_for(event: Callable[[], bool], child: subprocess.Popen[bytes], patience: Patience) -> bool:
    """Waits for an event. Returns False if the child takes longer."""
    pulse = Pulse(patience)
    pulse.ask(time.monotonic(), processor_s(child.pid))
    while not event():
        if pulse.judge(time.monotonic(), processor_s(child.pid), is_stopped=False) == "hung":
            return False
        await asyncio.sleep(TICK_S)
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
