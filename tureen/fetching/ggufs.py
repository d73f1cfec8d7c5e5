"""Knows how GGUF files are named: by their quantisation, and in parts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
TAG: Final = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_0|MXFP4\w*|BF16|F16|F32|FP16))$", re.IGNORECASE)
PROJECTOR: Final = "mmproj"
"""A word in the names of files with the vision encoder of a model."""
WORDS: Final = re.compile(r"[-_.]")
SIZE: Final = re.compile(r"(?<![a-z0-9])[ae]?\d+(?:\.\d+)?[bm](?![a-z0-9])")
"""A number of parameters in a name in small letters: 7b, 0.5b, 500m, a3b, e4b."""
PROJECTOR_TAGS: Final = ("F16", "FP16", "BF16", "Q8_0", "F32")
"""Their types, the one that is taken first."""
DEFAULT_TAG: Final = "Q4_K_M"
"""The quantisation that is taken where none is named: small, and close to the original."""


class Companion(NamedTuple):
    """The mmproj file that goes with a model, and what the log says about the choice."""

    path: Path | None = None
    note: str = ""
    is_warning: bool = False


def stem(name: str) -> str:
    """Returns a file's name without its ending, and without the number of a part."""
    match = PART.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")


def parts(name: str) -> list[str]:
    """Returns the names of all parts of a split model, of which `name` is one; a file that is no part is the only
    one."""
    match = PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]


def groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the models among the files by their stems, each with its parts in order. Projectors are not models."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not is_projector(name):
            models.setdefault(stem(name), []).append(name)
    return models


def is_projector(name: str) -> bool:
    """Returns whether a file has the vision encoder of a model."""
    return name.endswith(".gguf") and PROJECTOR in WORDS.split(name.rpartition("/")[2].lower())


def projector_for(model: str, names: Iterable[str]) -> str | None:
    """Returns the file with the vision encoder, of those in the folder of a model's file or else at the top; None if
    there is none, or they name models of other sizes. Of several, one that has most words of the model's name, and then
    the first of PROJECTOR_TAGS."""
    projectors = sorted(name for name in names if is_projector(name) and not _is_of_other_size(name, model))
    folder = model.rpartition("/")[0]
    near = [name for name in projectors if name.rpartition("/")[0] == folder]
    near = near or [name for name in projectors if "/" not in name]
    common = [len(_words(name) & _words(model)) for name in near]
    near = [name for name, count in zip(near, common, strict=True) if count == max(common)]
    by_tag = {tag_of(stem(name)): name for name in reversed(near)}
    return next((by_tag[tag] for tag in PROJECTOR_TAGS if tag in by_tag), near[0] if near else None)


def _is_of_other_size(name: str, model: str) -> bool:
    sizes, own = (set(SIZE.findall(stem(each.rpartition("/")[2]).lower())) for each in (name, model))
    return bool(sizes and own) and not sizes & own


def _words(name: str) -> set[str]:
    return set(WORDS.split(stem(name.rpartition("/")[2]).lower()))


def tag_of(model: str) -> str:
    """Returns the quantisation in a stem, in capitals; the stem itself where it names none."""
    match = TAG.search(model)
    return match[1].upper() if match else model.rpartition("/")[2]


def tags(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(tag_of, groups(names))))


def choose(names: Iterable[str], tag: str) -> list[str]:
    """Returns the files of one model: that with the tag (a quantisation, or a file's name), or without one the only
    one, or DEFAULT_TAG's. [] where none fits, or where several do."""
    models = groups(names)
    if not tag:
        if len(models) == 1:
            return next(iter(models.values()))
        tag = DEFAULT_TAG
    asked = stem(tag).lower()
    fits = [
        files
        for model, files in models.items()
        if tag_of(model).lower() == asked or asked in (model.lower(), model.rpartition("/")[2].lower())
    ]
    return fits[0] if len(fits) == 1 else []


def is_whole(files: list[str]) -> bool:
    """Says whether all parts of a model are there."""
    match = PART.fullmatch(files[0])
    return len(files) == (int(match["count"]) if match else 1)


def nearest(tag: str, known: Iterable[str]) -> str:
    """Returns the known tag that one is most like; "" where none is."""
    by_plain = {name.lower(): name for name in known}
    near = difflib.get_close_matches(tag.lower(), by_plain, n=1, cutoff=0.5)
    return by_plain[near[0]] if near else ""


def projectors_next_to(model: Path) -> list[Path]:
    """Returns the mmproj files of the model's folder. In a snapshot of a hub's repository, returns the one that is
    fetched with the model."""
    snapshot = next((folder for folder in model.parents[:2] if folder.parent.name == "snapshots"), None)
    try:
        if snapshot is None:
            return sorted(path for path in model.parent.iterdir() if is_projector(path.name) and path != model)
        names = [path.relative_to(snapshot).as_posix() for path in (*snapshot.glob("*"), *snapshot.glob("*/*"))]
    except OSError:
        return []
    own = model.relative_to(snapshot).as_posix()
    chosen = projector_for(own, [name for name in names if name != own])
    return [] if chosen is None else [snapshot / chosen]
