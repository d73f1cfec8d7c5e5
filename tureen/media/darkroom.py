"""Started once: `python -I -m tureen.media.darkroom CONTROL SETUP`. Has Pillow and the family in memory, and forks.

It reads nothing that a client sent: the pictures of a prompt are decoded by a child of their own, which has given up
all rights before, and ends with its reply. So one that breaks its decoder meets no other client's pictures.
"""

from __future__ import annotations

import binascii
import contextlib
import gc
import io
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from PIL import Image, JpegImagePlugin, MpoImagePlugin, TiffImagePlugin

from tureen.errors import TureenError
from tureen.grammar import helper
from tureen.jail import seccomp
from tureen.media import video
from tureen.media.base import Family, Modality, Prepared
from tureen.media.decode import MAX_PIXELS, ORIENTATION, Refused, decode
from tureen.media.families import find_family
from tureen.media.references import MAX_BYTES
from tureen.media.wire import BEGUN, SIZE, Item, Job, Refusal, Reply, Setup

MEMORY_BYTES = 1536 << 20
"""That the pictures of one prompt may take."""

MAX_PROMPT_PIXELS = 2 * MAX_PIXELS
CPU_S = 15
WALL_S = 60
"""For all pictures of a prompt. Who waits longer than that does not compute."""

PRELOADED = (JpegImagePlugin, MpoImagePlugin, TiffImagePlugin)
"""That Pillow loads when it first meets a file that needs them: no file opens in the jail."""

_job = msgspec.msgpack.Decoder(Job)


class At(Exception):
    """A picture is refused."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def main(control: int, setup: int, make_family: Callable[[Setup], Family]) -> None:
    """Serve until the front is gone. Descriptors: a socket, and memory with a Setup."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # the server decides when to stop; its end is the end of the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing to bury
    front = socket.socket(fileno=control)
    family = make_family(msgspec.msgpack.decode(helper.contents(setup), type=Setup))
    os.close(setup)
    warm_up(family)
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(front, 1, 1)
        if not data:
            break
        with contextlib.suppress(OSError):  # no room for a child: the connection closes, and the front knows
            _fork(family, front, descriptors[0])
        os.close(descriptors[0])


def family_of(setup: Setup) -> Family:
    return find_family(msgspec.json.decode(setup.hf), msgspec.json.decode(setup.preprocessor))


def warm_up(family: Family) -> None:
    """Meet each format once, so that all they need is loaded."""
    picture = Image.new("RGB", (64, 48), "red")
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for kind, mode in (("PNG", "P"), ("PNG", "LA"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA")):
        file = io.BytesIO()
        made = picture.convert(mode)
        made.save(file, kind, exif=exif, **({} if kind == "JPEG" else {"save_all": True, "append_images": [made]}))
        decode(file.getvalue())
        list(video.frames(file.getvalue()))
    video.warm_up()
    family.prepare([picture], "image")


def develop(family: Family, job: Job, sources: Sequence[bytes]) -> Reply:
    """Decode and prepare."""
    try:
        modality: Modality = job.modality  # type: ignore[assignment]
        prepared = family.prepare(_pictures(job, sources), modality)
        return Reply(tuple(map(_item, prepared)))
    except At as fault:
        return Reply(refusal=Refusal(str(fault), fault.index))
    except TureenError as error:
        return Reply(refusal=Refusal(error.message))
    except MemoryError:
        return Reply(refusal=Refusal(f"takes more than {MEMORY_BYTES >> 20} MiB of memory to decode; make it smaller"))
    except Exception as error:  # noqa: BLE001 - a fault of ours: its words may hold what a client sent
        return Reply(refusal=Refusal(f"could not be prepared: internal error ({_place(error)})", is_ours=True))


def _pictures(job: Job, sources: Sequence[bytes]) -> list[Image.Image]:
    """Raises At, MemoryError."""
    found: list[Image.Image] = []
    num_pixels = 0
    for index, (source, is_base64) in enumerate(zip(sources, job.are_base64, strict=True)):
        try:
            data = _unwrapped(source) if is_base64 else source
            is_film = job.modality == "video" and len(sources) == 1
            for picture in video.frames(data) if is_film else [decode(data)]:
                found.append(picture)
                num_pixels += picture.width * picture.height
                if num_pixels > MAX_PROMPT_PIXELS:
                    raise Refused(
                        f"is too much: the pictures of a prompt, or the {video.MAX_FRAMES} frames taken of a film, may "
                        f"have {MAX_PROMPT_PIXELS} pixels in all; make them smaller"
                    )
        except Refused as error:
            raise At(str(error), index) from None
    if not found:
        raise At("holds no pictures", 0)
    return found


def _unwrapped(source: bytes) -> bytes:
    """Raises Refused."""
    try:
        data = binascii.a2b_base64(source.translate(None, b" \t\r\n"), strict_mode=True)
    except binascii.Error:
        raise Refused("is no valid base64: A-Z, a-z, 0-9, + and /, filled up with = to groups of four") from None
    if len(data) > MAX_BYTES:
        raise Refused(f"has {len(data)} bytes; it may have {MAX_BYTES >> 20} MiB")
    return data


def _item(one: Prepared) -> Item:
    tiles, height, width, channels = one.pixels.shape
    pixels = np.ascontiguousarray(one.pixels, dtype=np.uint8).tobytes()
    return Item(pixels, (tiles, height, width, channels), one.num_tokens, one.layout)


def _place(error: BaseException) -> str:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno}" if place else "?"
    return f"{type(error).__name__} in {where}"


def _fork(family: Family, front: socket.socket, descriptor: int) -> None:
    """Raises OSError."""
    parent = os.getpid()
    if os.fork() == 0:
        try:
            front.detach()  # closed with all others
            connection = socket.socket(fileno=descriptor)
            _lock_in(descriptor, parent)
            connection.sendall(BEGUN)
            job = _job.decode(_receive(connection, SIZE.unpack(_receive(connection, SIZE.size))[0]))
            reply = develop(family, job, [_receive(connection, size) for size in job.sizes])
            data = msgspec.msgpack.encode(reply)
            connection.sendall(SIZE.pack(len(data)))
            connection.sendall(data)
        finally:
            os._exit(0)


def _lock_in(keep: int, parent: int) -> None:
    """Give up all rights, and all time but some. The filter leaves no way to stop the clock, or what it does."""
    seccomp.control(seccomp.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    helper.confine(MEMORY_BYTES)
    os.environ.clear()
    os.closerange(0, keep)
    os.closerange(keep + 1, 1 << 16)
    for limit, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, keep + 1), (resource.RLIMIT_NPROC, 0)):
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    signal.setitimer(signal.ITIMER_REAL, WALL_S)  # its signal ends the process
    if not seccomp.is_supported():
        return
    seccomp.control(seccomp.PR_SET_DUMPABLE, 0)
    seccomp.lock_in()
    with contextlib.suppress(PermissionError):
        os.open("/", os.O_RDONLY)
        os._exit(1)  # a filter that does not hold: nothing of a client may be decoded here


def _receive(connection: socket.socket, size: int) -> bytes:
    """Ends the process when the front is gone."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            os._exit(1)
        view = view[count:]
    return bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), family_of)
