"""Decodes some of a film's frames to RGB. Runs in a process of its own: see decode_worker.py.

Animated GIF, WEBP and PNG are read by Pillow; MP4 and WebM by PyAV, where the operator has installed it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from tureen.media.decode import Refused, check_size, kind_of, open_picture, pillow_may_fail, to_rgb

try:
    import av
except ImportError:  # the extra `video`
    av = None

MAX_FRAMES = 32
"""Most frames that are taken of a film."""

MAX_STORED_FRAMES = 10_000
MAX_DECODED_PIXELS = 1 << 30
"""Most pixels in all frames up to the last one taken: a frame is decoded from those before it."""

CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4"})


def sampled(count: int) -> list[int]:
    """Returns the indices of the frames that are used: the first, the last and some evenly between them; all where
    they are few."""
    taken = min(count, MAX_FRAMES)
    return [int(index) for index in np.linspace(0, count - 1, taken)]


def frames(data: bytes) -> Iterator[Image.Image]:
    """Yields at most MAX_FRAMES frames. A picture that does not move is a film of one. Raises Refused, MemoryError."""
    container = _container(data)
    if container is None:
        yield from _of_animation(data)
    elif av is not None:
        with pillow_may_fail():
            yield from _of_container(data, container)
    else:
        raise Refused(
            "is a film in MP4 or WebM, which needs the extra 'video' of tureen on the server; send an animated GIF or "
            "WEBP, or the frames as a list of pictures"
        )


def warm_up() -> None:
    """Has PyAV load all that it needs, by writing and reading a film."""
    if av is None:
        return
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as film:
        stream = film.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        film.mux([*stream.encode(av.VideoFrame(16, 16, "yuv420p")), *stream.encode()])
    list(frames(file.getvalue()))


def _container(data: bytes) -> str | None:
    if data[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if data.startswith(b"\x1aE\xdf\xa3") else None


def _of_animation(data: bytes) -> Iterator[Image.Image]:
    kind = kind_of(data)
    if kind is None:
        raise Refused("is not an MP4, WebM, GIF, WEBP, PNG or JPEG file")
    image = open_picture(data)
    with pillow_may_fail():
        count = getattr(image, "n_frames", 1) if kind != "JPEG" else 1
        for index in _affordable(count, image.width, image.height):
            image.seek(index)
            check_size(*image.size)  # a GIF's frame may go beyond its canvas, which grows
            yield to_rgb(image)


def _affordable(count: int, width: int, height: int) -> list[int]:
    """Returns the indices of the frames to take. Raises Refused."""
    check_size(width, height)
    if count > MAX_STORED_FRAMES:
        raise Refused(f"has {count} frames; it may have {MAX_STORED_FRAMES}: make it shorter")
    if count * width * height > MAX_DECODED_PIXELS:
        raise Refused(
            f"has {count} frames of {width} x {height} pixels; they may have {MAX_DECODED_PIXELS} in all: make it "
            "shorter or smaller"
        )
    return sampled(count)


def _of_container(data: bytes, name: str) -> Iterator[Image.Image]:
    """Yields the frames of an MP4 or WebM film. Raises whatever PyAV raises, Refused."""
    with av.open(io.BytesIO(data), format=name) as film:
        if not film.streams.video:
            raise Refused("holds no pictures")
        stream = film.streams.video[0]
        if stream.codec_context.codec.canonical_name not in CODECS:
            raise Refused(f"is encoded in a way that is not read; {', '.join(sorted(CODECS))} are")
        count = sum(packet.size > 0 for packet in film.demux(stream))
        indices = set(_affordable(count, stream.codec_context.width, stream.codec_context.height))
    with av.open(io.BytesIO(data), format=name) as film:
        stream = film.streams.video[0]
        stream.codec_context.thread_count = 1  # the process may start none
        for index, frame in enumerate(film.decode(stream)):
            if index in indices:
                check_size(frame.width, frame.height)
                yield _upright(frame)


def _upright(frame: Any) -> Image.Image:
    picture: Image.Image = frame.to_image(threads=1)
    turn = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
    transpose = turn.get(frame.rotation % 360)
    return picture if transpose is None else picture.transpose(transpose)
