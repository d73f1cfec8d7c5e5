"""Sends pixels to a child process: each picture once, however many requests show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from tureen.contract.types import GenerateRequest, Submit, ToEngine


class Keep(msgspec.Struct, frozen=True, tag="keep", array_like=True):
    """Carries a picture of requests that are about to come."""

    digest: str
    pixels: bytes


class Forget(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    """Says that none of the requests that show a picture is left."""

    digest: str


ToChild = ToEngine | Keep | Forget


class PixelSender:
    """The front's side: counts the requests that show a picture, and holds no pixels."""

    def __init__(self, send: Callable[[ToChild], None]) -> None:
        self._send = send
        self._counts: Counter[str] = Counter()  # requests that show it, by digest

    def send_pixels(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request without its pixels; sends those to the child that it does not have yet."""
        for item in request.media:
            if not self._counts[item.digest]:
                self._send(Keep(item.digest, item.pixels))
            self._counts[item.digest] += 1
        return _with_pixels(request, lambda _: b"")

    def release(self, request: GenerateRequest) -> None:
        """Notes that a request has ended; tells the child to forget pictures that no other request shows."""
        for item in request.media:
            self._counts[item.digest] -= 1
            if not self._counts[item.digest]:
                del self._counts[item.digest]
                self._send(Forget(item.digest))


class PixelReceiver:
    """The child's side: holds the pixels, and puts them back into requests."""

    def __init__(self) -> None:
        self._pixels: dict[str, bytes] = {}

    def receive(self, message: ToChild) -> ToEngine | None:
        """Takes a message. Returns the message for the engine, if there is one."""
        if isinstance(message, Keep):
            self._pixels[message.digest] = message.pixels
            return None
        if isinstance(message, Forget):
            del self._pixels[message.digest]
            return None
        if isinstance(message, Submit) and message.request.media:
            return msgspec.structs.replace(message, request=_with_pixels(message.request, self._pixels.__getitem__))
        return message


def _with_pixels(request: GenerateRequest, find: Callable[[str], bytes]) -> GenerateRequest:
    media = tuple(msgspec.structs.replace(item, pixels=find(item.digest)) for item in request.media)
    return msgspec.structs.replace(request, media=media)
