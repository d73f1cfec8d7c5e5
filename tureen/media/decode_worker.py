"""A fork server that has Pillow and the model's family in memory.

Each prompt's pictures are decoded by a worker of their own. It has given up all rights before, and ends with its reply,
so one that breaks its decoder meets no other client's pictures.
"""

from __future__ import annotations

import binascii
import io
import os
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from PIL import Image, JpegImagePlugin, MpoImagePlugin, TiffImagePlugin

from tureen.errors import TureenError
from tureen.media import video
from tureen.media.base import Family, Modality, Prepared
from tureen.media.decode import MAX_PIXELS, ORIENTATION, Refused, decode, reduced
from tureen.media.families import find_family
from tureen.media.references import MAX_BYTES
from tureen.media.wire import LIMITS, MAX_REPLY_BYTES, SIZE, DecodeJob, DecodeReply, DecoderSetup, Item, Refusal
from tureen.sandbox import fork_server
from tureen.sandbox.fork_server import Program

MAX_PROMPT_PIXELS = 2 * MAX_PIXELS

PRELOADED = (JpegImagePlugin, MpoImagePlugin, TiffImagePlugin)
"""Plug-ins that Pillow would load when it first meets a file that needs them: workers open no files."""

_job = msgspec.msgpack.Decoder(DecodeJob)


class PictureRefused(Exception):
    """A picture is refused; `index` says which."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def program(make_family: Callable[[DecoderSetup], Family], setup: bytes) -> Program:
    """Returns the program of the workers; setup: a DecoderSetup as msgpack."""
    settings = msgspec.msgpack.decode(setup, type=DecoderSetup)
    family = make_family(settings)
    warm_up(family)
    return Program(LIMITS, lambda _: partial(_handle, family, settings.max_pixels))


def _handle(family: Family, max_pixels: int | None, message: bytes) -> bytes:
    """Answers a message: a DecodeJob with the pictures behind it."""
    start = SIZE.size + SIZE.unpack_from(message)[0]
    job = _job.decode(message[SIZE.size : start])
    sources = []
    for size in job.sizes:
        sources.append(message[start : start + size])
        start += size
    return msgspec.msgpack.encode(decode_all(family, job, sources, max_pixels))


def family_of(setup: DecoderSetup) -> Family:
    """Returns the family of models that the setup's configs belong to."""
    return find_family(msgspec.json.decode(setup.hf), msgspec.json.decode(setup.preprocessor))


def warm_up(family: Family) -> None:
    """Decodes one picture of each format, so that all that workers need is loaded."""
    picture = Image.new("RGB", (64, 48), "red")
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for kind, mode in (("PNG", "P"), ("PNG", "LA"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA")):
        file = io.BytesIO()
        image = picture.convert(mode)
        image.save(file, kind, exif=exif, **({} if kind == "JPEG" else {"save_all": True, "append_images": [image]}))
        decode(file.getvalue())
        list(video.frames(file.getvalue()))
    video.warm_up()
    family.prepare([picture], "image")


def decode_all(family: Family, job: DecodeJob, sources: Sequence[bytes], max_pixels: int | None = None) -> DecodeReply:
    """Decodes and prepares the pictures of a prompt, first reduced to `max_pixels` each."""
    try:
        modality: Modality = job.modality  # type: ignore[assignment]
        pictures = _pictures(job, sources)
        if max_pixels is not None:
            pictures = [reduced(picture, max_pixels) for picture in pictures]
        prepared = family.prepare(pictures, modality)
        if sum(item.pixels.nbytes for item in prepared) > MAX_REPLY_BYTES:
            most = f"the pictures of a prompt may have {MAX_REPLY_BYTES >> 20} MiB after preprocessing"
            return DecodeReply(refusal=Refusal(f"is too much: {most}; send fewer"))
        return DecodeReply(tuple(map(_item, prepared)))
    except PictureRefused as fault:
        return DecodeReply(refusal=Refusal(str(fault), fault.index))
    except TureenError as error:
        return DecodeReply(refusal=Refusal(error.message))
    except MemoryError:
        return DecodeReply(
            refusal=Refusal(f"takes more than {LIMITS.memory_bytes >> 20} MiB of memory to decode; make it smaller")
        )
    except Exception as error:  # noqa: BLE001 - a fault of ours: its words may hold what a client sent
        return DecodeReply(refusal=Refusal(f"could not be prepared: internal error ({_place(error)})", is_ours=True))


def _pictures(job: DecodeJob, sources: Sequence[bytes]) -> list[Image.Image]:
    """Raises PictureRefused, MemoryError."""
    pictures: list[Image.Image] = []
    num_pixels = 0
    for index, (source, is_base64) in enumerate(zip(sources, job.are_base64, strict=True)):
        try:
            data = _unwrapped(source) if is_base64 else source
            is_film = job.modality == "video" and len(sources) == 1
            for picture in video.frames(data) if is_film else [decode(data)]:
                pictures.append(picture)
                num_pixels += picture.width * picture.height
                if num_pixels > MAX_PROMPT_PIXELS:
                    raise Refused(
                        f"is too much: the pictures of a prompt, or the {video.MAX_FRAMES} frames taken of a film, may "
                        f"have {MAX_PROMPT_PIXELS} pixels in all; make them smaller"
                    )
        except Refused as error:
            raise PictureRefused(str(error), index) from None
    if not pictures:
        raise PictureRefused("holds no pictures", 0)
    return pictures


def _unwrapped(source: bytes) -> bytes:
    """Raises Refused."""
    try:
        data = binascii.a2b_base64(source.translate(None, b" \t\r\n"), strict_mode=True)
    except binascii.Error:
        raise Refused("is not valid base64: A-Z, a-z, 0-9, + and /, padded with = to groups of four") from None
    if len(data) > MAX_BYTES:
        raise Refused(f"has {len(data)} bytes; it may have {MAX_BYTES >> 20} MiB")
    return data


def _item(prepared: Prepared) -> Item:
    tiles, height, width, channels = prepared.pixels.shape
    pixels = np.ascontiguousarray(prepared.pixels, dtype=np.uint8).tobytes()
    return Item(pixels, (tiles, height, width, channels), prepared.num_tokens, prepared.layout)


def _place(error: BaseException) -> str:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno}" if place else "?"
    return f"{type(error).__name__} in {where}"


if __name__ == "__main__":
    fork_server.main(partial(program, family_of))
