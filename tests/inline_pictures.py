"""Workers that decode pictures in the test's own process, with the real program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from inline_workers import Handle, InlineSupervisor

from tureen.sandbox.fork_server import Program


def supervisor(
    name: str, program: str, limits: object, *, setup: bytes = b"", tick: Callable[[], None] = lambda: None
) -> InlineSupervisor:
    """Make what MediaLoader takes for its Supervisor. The family of models is loaded with the first picture."""

    def open_(descriptors: Sequence[int]) -> Handle:
        return _program(setup).open(descriptors)

    return InlineSupervisor(name, open_, tick)


@functools.cache
def _program(setup: bytes) -> Program:
    from tureen.media import decode_worker  # with Pillow, which most tests do not need

    return decode_worker.program(decode_worker.family_of, setup)
