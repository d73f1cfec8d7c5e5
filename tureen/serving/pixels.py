"""Pixels on their way to a child process: each picture once, however many requests that have not ended show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from tureen.contract.types import GenerateRequest, Submit, ToEngine


class Keep(msgspec.Struct, frozen=True, tag="keep", array_like=True):
    """A picture of requests that are about to come."""

    digest: str
    pixels: bytes


class Forget(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    """None of the requests that came with it is left."""

    digest: str


ToChild = ToEngine | Keep | Forget


class Lender:
    """The front's side: counts, and holds no pixels."""

    def __init__(self, send: Callable[[ToChild], None]) -> None:
        self._send = send
        self._counts: Counter[str] = Counter()  # requests that show it, by digest

    def lend(self, request: GenerateRequest) -> GenerateRequest:
        """The request without its pixels, which the child has then."""
        for item in request.media:
            if not self._counts[item.digest]:
                self._send(Keep(item.digest, item.pixels))
            self._counts[item.digest] += 1
        return _with_pixels(request, lambda _: b"")

    def take_back(self, request: GenerateRequest) -> None:
        """The request has ended."""
        for item in request.media:
            self._counts[item.digest] -= 1
            if not self._counts[item.digest]:
                del self._counts[item.digest]
                self._send(Forget(item.digest))


class Borrower:
    """The child's side."""

    def __init__(self) -> None:
        self._pixels: dict[str, bytes] = {}

    def receive(self, message: ToChild) -> ToEngine | None:
        """Returns the message for the engine, if there is one."""
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
