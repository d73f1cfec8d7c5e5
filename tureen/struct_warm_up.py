"""Builds the type information of msgspec before several threads use it.

msgspec builds the information on a Struct when something first decodes or converts to it. It publishes that information
before it is complete: a second thread that uses it meanwhile crashes the process.

Imports: nothing; msgspec.
Imported by: data_parallel, http, offline, runner, serving.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import msgspec

PACKAGE = __name__.partition(".")[0]

_lock = threading.Lock()


def warm_up_structs() -> None:
    """Build the information on all Structs of this package that were imported so far, and on the types inside of them.

    Each process calls this once, before it starts threads that decode or convert.
    """
    with _lock:
        for kind in imported_structs():
            with contextlib.suppress(TypeError):  # msgspec can decode no such Struct, so no thread does
                msgspec.json.Decoder(kind)


def imported_structs() -> Iterator[type[msgspec.Struct]]:
    """Yield the Structs of this package that were imported so far."""
    kinds: list[type[msgspec.Struct]] = [msgspec.Struct]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
        if kind.__module__.partition(".")[0] == PACKAGE:
            yield kind
