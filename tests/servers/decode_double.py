"""A fork server for pictures whose family does what a picture's width says, and else takes pictures as they are."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import numpy as np

from tureen.errors import InvalidRequest
from tureen.media import decode_worker
from tureen.media.base import Prepared
from tureen.sandbox import fork_server

sys.path.append(str(Path(__file__).parents[1]))  # the interpreter of a fork server adds nothing by itself
from fault_injection import MISDEEDS

SPIN, SLEEP, CRASH, EXIT, TAKE_MEMORY, FAULT, REFUSE, LIE, ESCAPE = range(901, 910)


class PlainFamily:
    """Pictures keep their size; a token for each eight columns. The frames of a film have the size of the first."""

    placeholder = "<image>"
    placeholder_id = 7
    video_placeholder = "<video>"
    video_placeholder_id = 8
    part_tokens = ()

    def prepare(self, pictures, modality):
        for picture in pictures:
            ACTIONS.get(picture.width, lambda: None)()
        if modality == "video":
            same = [np.asarray(one.resize(pictures[0].size)) for one in pictures]
            return [Prepared(np.stack(same), len(pictures), (len(pictures),))]
        return [Prepared(np.asarray(one)[None], max(1, one.width // 8), one.size) for one in pictures]


def fault():
    raise KeyError("/home/secret at 0x7f001122")


def refuse():
    raise InvalidRequest("has no place in this model")


def lie():
    """As a decoder that was taken over: it answers what it likes on what it has."""
    for descriptor in range(64):
        with contextlib.suppress(OSError):
            os.write(descriptor, (1 << 31).to_bytes(4, "little") + b"\xff" * 5000)
    os._exit(0)


def escape():
    """Tries what no decoder needs, and raises when any of it works."""
    attempts = {
        "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "socket": lambda: socket.socket(),
        "fork": lambda: os.fork(),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "kill": lambda: os.kill(os.getppid(), 0),
        "timer": lambda: signal.setitimer(signal.ITIMER_REAL, 0),
        "listdir": lambda: os.listdir("/proc/self/fd"),
    }
    done = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError as error:
            if error.errno == errno.EPERM:
                continue
        done.append(name)
    raise InvalidRequest(f"could do {done} with {len(os.environ)} variables")


ACTIONS = {
    SPIN: MISDEEDS["spin"],
    SLEEP: MISDEEDS["sleep"],
    CRASH: MISDEEDS["crash"],
    EXIT: MISDEEDS["exit"],
    TAKE_MEMORY: MISDEEDS["memory"],
    FAULT: fault,
    REFUSE: refuse,
    LIE: lie,
    ESCAPE: escape,
}


if __name__ == "__main__":
    assert Path(sys.argv[0]).name == "decode_double.py"
    decode_worker.LIMITS = decode_worker.LIMITS._replace(cpu_s=1, alarm_s=10.0, memory_bytes=256 << 20)
    fork_server.main(partial(decode_worker.program, lambda setup: PlainFamily()))
