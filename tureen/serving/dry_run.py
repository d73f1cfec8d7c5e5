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
from collections.abc import Mapping
from typing import Any, Final

from tureen.config import Config
from tureen.engine.adapters import PATH_FIELD
from tureen.errors import InvalidRequest, Unavailable
from tureen.log import get_logger
from tureen.sandbox import child_process
from tureen.sandbox.pulse import Patience, Pulse
from tureen.serving.watchdog import processor_s

PROGRAM: Final = "tureen.runner.dry_run_child"
FIELDS: Final = {
    "load_adapter": (PATH_FIELD, "invalid_adapter"),
    "load_model": ("model_path", "invalid_model_path"),
    "update_weights": ("model_path", "invalid_model_path"),
}
"""Operations that read files -> the field of a request that names the files, and the code of an error about them."""

PATIENCE = Patience(cpu_s=60.0, idle_s=120.0)
TICK_S = 0.02
END_S = 1.0  # for a killed child to be gone; one that waits for a disk takes longer
MAX_ORDER_BYTES: Final = 32 << 10
"""A pipe takes this many bytes before the child reads. No path of a file is so long."""

log = get_logger("serving")


async def dry_run(op: str, args: Mapping[str, Any], config: Config) -> None:
    """Reads the files that the operation `op` names. Does nothing for an operation that reads none.

    config: of the model that is served. Raises InvalidRequest if reading does not end, or ends the process; Unavailable
    if no process can be started. The engine finds all other faults.
    """
    if op not in FIELDS:
        return
    field, code = FIELDS[op]
    order = {
        "op": op,
        "path": args["path"],
        "load_format": args.get("load_format") or config.load_format,
        "model_path": config.model_path,
        "download_dir": config.download_dir,
        "revision": config.revision,
    }
    fault = await read_in_child(order)
    if fault:
        log.warning("%s: nothing was loaded: reading %s %s", op, args["path"], fault)
        raise InvalidRequest(
            f"{field}: reading these files {fault}, in a process of its own; nothing was loaded. Give files whose "
            "maker you trust",
            field=field,
            code=code,
        )


async def read_in_child(order: Mapping[str, Any]) -> str:
    """Returns what goes wrong when a child process does the order; "" = it ends. Raises Unavailable if the process does
    not begin: no file is to blame."""
    message = json.dumps(order).encode()
    if len(message) > MAX_ORDER_BYTES:
        return ""
    nowhere = subprocess.DEVNULL
    try:
        child = child_process.start(PROGRAM, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
    except OSError as error:
        raise Unavailable(
            f"the system starts no process to read these files in ({error.strerror}); try again later"
        ) from None
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as orders:  # broken: it has ended, its status says why
            orders.write(message)
        return await _outcome(child)
    finally:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(child.wait, END_S)


async def _outcome(child: subprocess.Popen[bytes]) -> str:
    """Waits for the child's end. Returns what went wrong. Raises Unavailable."""
    pulse = Pulse(PATIENCE)
    pulse.ask(time.monotonic(), 0.0)
    while child.poll() is None:
        if pulse.judge(time.monotonic(), processor_s(child.pid), is_stopped=False) == "hung":
            limits = f"{PATIENCE.cpu_s:g} s of processor time or {PATIENCE.idle_s:g} s in all"
            return f"did not end within {limits} (a slow disk can be the cause, too)"
        await asyncio.sleep(TICK_S)
    if child.returncode > 0:  # not by the files: whatever their readers raise, the status is 0
        log.error("python -m %s ends with status %d: run it to see why", PROGRAM, child.returncode)
        raise Unavailable(
            "the program that reads these files first cannot run here; the server's log says how to see why"
        )
    return f"was ended by {_signal_name(-child.returncode)}" if child.returncode else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
