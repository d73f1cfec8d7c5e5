"""Chooses the attention backend of a model in torch: one that a file of this package declares.

A backend is a file with
- `ATTENTION_BACKENDS`: the names that `--attention-backend` has for it, in a tuple;
- `PREFERENCE`: where several can, `auto` takes the one with the highest number;
- `why_unsupported(needs)`: returns why it cannot do what a model needs, or "" where it can;
- `make_backend(layers, keys, values)`: returns an `AttentionBackend` over these pages.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from tureen.attention.base import AttentionNeeds
from tureen.errors import StartupError, echo
from tureen.registry import declared

AUTO, NATIVE = "auto", "native"
"""Names that no file has: whichever backend can, and the attention inside of the native kernels."""


def find_backend(name: str, needs: AttentionNeeds) -> ModuleType:
    """Imports the backend of this name, or for `auto` the preferred one of those that can.

    Raises StartupError, naming the setting, for an unknown name, and where the backend cannot do what is needed.
    """
    known = declared("tureen.attention", "ATTENTION_BACKENDS")
    if name not in (AUTO, *known):
        raise StartupError(
            f"--attention-backend {echo(name)}: known in torch: {', '.join(sorted(known))}; or leave it out",
            field="attention_backend",
        )
    names = sorted(known) if name == AUTO else [name]
    backends = {each: importlib.import_module(known[each]) for each in names}
    faults = {each: str(backend.why_unsupported(needs)) for each, backend in backends.items()}
    able = [backends[each] for each in names if not faults[each]]
    if not able:
        told = "; ".join(f"{each}: {fault}" for each, fault in faults.items())
        raise StartupError(f"--attention-backend {name}: {told}", field="attention_backend")
    return max(able, key=lambda backend: int(backend.PREFERENCE))
