"""Takes the name of a model apart: a path, a wheel, a repository of the hub, or a model on the shelf."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tureen.errors import StartupError
from tureen.fetching.kept import PREFIX
from tureen.fetching.shelf import shelf

HUB_PREFIX: Final = "hf:"
HUB_ID: Final = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<tag>[\w.-]+))?", re.ASCII)
WHAT_IS_TAKEN: Final = (
    "a folder, a .gguf file, pypi:NAME==VERSION, ORG/NAME or ORG/NAME:Q4_K_M on the hub, or one of "
    + ", ".join(shelf().models)
)


class Reference(NamedTuple):
    """A model's name taken apart. `name`: the path, pypi:NAME==VERSION, ORG/NAME, or the name on the shelf."""

    kind: Literal["path", "wheel", "hub", "shelf"]
    name: str
    tag: str = ""


def parse(name: str) -> Reference:
    """Returns what a name stands for; what exists as a file or folder is that. Raises StartupError with what was meant,
    perhaps."""
    if name.startswith(PREFIX):
        return Reference("wheel", name)
    plain = name.removeprefix(HUB_PREFIX)
    path = Path(os.path.expanduser(name))
    if plain == name and name and exists(path):
        return Reference("path", str(path))
    known = None if plain != name else on_shelf(name)
    if known is not None:
        return Reference("shelf", known)
    match = HUB_ID.fullmatch(plain)
    if match is not None and (plain != name or not plain.endswith(".gguf") or match["tag"]):
        return Reference("hub", match["name"], match["tag"] or "")
    if sizes := _on_hub(name):
        size, on_hub = sizes[0]
        raise StartupError(f"model {name}: this is Ollama's name; size {size} on the hub is {on_hub}")
    raise StartupError(f"model {name[:300]!r}: no such file or folder{_near_miss(name, path)}; give {WHAT_IS_TAKEN}")


def on_shelf(name: str) -> str | None:
    """Returns the name on the shelf that is meant: in any case, and without its size where there is one size only."""
    asked = name.lower()
    names = list(shelf().models)
    sizes = [known for known in names if asked in (known, known.partition(":")[0])]
    return asked if asked in names else sizes[0] if len(sizes) == 1 else None


def of_ollama(name: str) -> str | None:
    """Returns what a model of Ollama's name is on the hub; None if that is not known. A tag begins with the size."""
    family, _, tag = name.partition(":")
    sizes = _on_hub(f"{family}:{tag.partition('-')[0]}")
    is_size = not tag or any(size == tag.lower().partition("-")[0] for size, _ in sizes)
    return sizes[0][1] if sizes and is_size else None


def _on_hub(name: str) -> list[tuple[str, str]]:
    """Return the sizes of a model of Ollama's name, and what each is on the hub: the size that is asked for first."""
    family, _, asked = name.lower().partition(":")
    return sorted(shelf().hub.get(family, {}).items(), key=lambda pair: pair[0] != asked)


def exists(path: Path) -> bool:
    """Returns whether there is a file or folder; False for a path that none can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _near_miss(name: str, path: Path) -> str:
    close = difflib.get_close_matches(name.lower(), shelf().models, n=1)
    if close:
        return f" (did you mean {close[0]}?)"
    try:
        siblings = os.listdir(path.parent)
    except (OSError, ValueError):
        return ""
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""
