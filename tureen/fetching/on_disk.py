"""Knows which models are on this machine, under which names, and removes them."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tureen.config import Config, cache_dir
from tureen.errors import StartupError
from tureen.fetching import ggufs, kept, names
from tureen.fetching.pull import BUILT_FOLDER, HUB_FOLDER, find_here, hub_root
from tureen.fetching.shelf import shelf
from tureen.files import PART

SUFFIXES = (".gguf", ".safetensors")


class KeptModel(NamedTuple):
    """A model on this machine. `name`: what --model takes for it."""

    name: str
    path: Path
    num_bytes: int


def downloaded(config: Config) -> list[tuple[Path, int]]:
    """Returns the models that were fetched or built before, by what --model-path takes, with the bytes of their
    weights."""
    return _weights_below(cache_dir(config))


def _weights_below(folder: Path) -> list[tuple[Path, int]]:
    sizes: defaultdict[Path, int] = defaultdict(int)
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            sizes[_model_path(path)] += path.stat().st_size
    return sorted(sizes.items())


def _model_path(file: Path) -> Path:
    """Returns the --model-path for a file: its folder, where the file is a part of a model; the first of its parts."""
    return file.parent if (file.parent / "config.json").is_file() else file.with_name(ggufs.parts(file.name)[0])


def kept_models(config: Config) -> list[KeptModel]:
    """Returns the models that can be served without a network: ours, and those of the hub's own cache.

    A model has its path as its name if the one name leads to another model, or to none: an older revision, a file with
    the quantisation of another, a file that was copied into the folder.
    """
    from tureen.fetching import hub  # noqa: PLC0415

    own = cache_dir(config)
    entries = [entry for entry in downloaded(config) if _is_whole(entry[0])]
    shared = hub.shared_cache()
    if shared != own / HUB_FOLDER:
        folders = sorted(shared.glob("models--*/snapshots/*"))
        entries += [entry for folder in folders for entry in _weights_below(folder) if _is_whole(entry[0])]
    return [KeptModel(_name_that_leads_to(path, config), path, size) for path, size in entries]


def _name_that_leads_to(path: Path, config: Config) -> str:
    """Returns the one name of a model, or its path if that name does not find it."""
    name = name_of(path, config)
    try:
        own_path = find_here(names.parse(name), config)
    except StartupError:
        own_path = None
    return name if own_path == path else str(path)


def _is_whole(path: Path) -> bool:
    """Returns whether all of a model is there, as far as a snapshot of the hub and the names of parts tell. The file of
    a vision encoder is no model."""
    from tureen.fetching import hub  # noqa: PLC0415

    if path.is_dir():
        return path.parent.name != "snapshots" or hub.model_in(path, "") is not None
    return not ggufs.is_projector(path.name) and all(path.with_name(name).is_file() for name in ggufs.parts(path.name))


def known_as(model: str, config: Config) -> str:
    """Return the one name of a model, also before it is fetched.

    model: as --model-path takes it. Before the fetch, a hub name without a tag stays without one: only the hub knows
    which file it means. Raises StartupError for a path at which nothing exists.
    """
    reference = names.parse(model)
    path = find_here(reference, config)
    if path is not None:
        return name_of(path, config)
    if reference.kind == "wheel":
        return _name_of_wheel(kept.parse(reference.name).requirement)
    return f"{reference.name}:{ggufs.tag_of(ggufs.stem(reference.tag))}" if reference.tag else reference.name


def name_on_hub(repository: str, path: Path) -> str:
    """Return the one name of a model of a hub repository: ORG/NAME, or ORG/NAME:TAG of a GGUF file."""
    return f"{repository}:{ggufs.tag_of(ggufs.stem(path.name))}" if path.suffix == ".gguf" else repository


def name_of(path: Path, config: Config) -> str:
    """Returns the one name of the model at a path, as lists, answers and messages have it.

    That is the name on the shelf, pypi:NAME==VERSION, ORG/NAME or ORG/NAME:TAG of the hub; of other files the name of
    the GGUF file or of the folder.
    """
    own = cache_dir(config)
    parts = path.relative_to(own).parts if path.is_relative_to(own) else ()
    if len(parts) > 1 and parts[0] == kept.FOLDER:
        return _name_of_wheel("==".join(parts[1].rsplit("-", 1)))
    if len(parts) == 2 and parts[0] == BUILT_FOLDER and parts[1] in shelf().models:
        return parts[1]
    for folder in path.parents:
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return name_on_hub(folder.parent.name.removeprefix("models--").replace("--", "/", 1), path)
    return ggufs.stem(path.name) if path.suffix == ".gguf" else path.resolve().name


def _name_of_wheel(requirement: str) -> str:
    """Returns the name on the shelf of a model in a wheel, NAME==VERSION, or pypi:NAME==VERSION."""
    joined = {name.replace(":", "-"): name for name, model in shelf().models.items() if model.joined_sha256}
    source = f"{kept.PREFIX}{requirement}"
    known = (name for name, model in shelf().models.items() if model.source == source)
    return joined.get(requirement.replace("==", "-")) or next(known, source)


def unfinished(config: Config) -> list[tuple[Path, int]]:
    """Returns what interrupted downloads have left, with its bytes: the next attempt goes on with it."""
    roots = {cache_dir(config), hub_root(config)}
    return sorted({(path, path.stat().st_size) for root in roots for path in root.rglob(f"*{PART}")})


def remove(name: str, config: Config) -> tuple[Path, int]:
    """Removes a model that was fetched or built, and what interrupted downloads of it have left.

    Returns its folder, and the bytes that are free again. Raises StartupError for one that is not here, and for files
    that did not come from `tureen pull`.
    """
    reference = names.parse(name)
    path = find_here(reference, config)
    if reference.kind == "path":
        raise StartupError(f"{name}: tureen rm removes only what tureen pull fetched; delete other files yourself")
    home = _home_of(reference, config)
    if reference.kind == "hub" and path is not None and not path.is_relative_to(home):
        raise StartupError(
            f"{name}: it is in the cache of the hub's own library, which other programs also use: {path}; remove it "
            "with hf cache rm"
        )
    before = _bytes_of(home)
    begun = re.compile(
        rf"\.{re.escape(home.name)}\.(part-\d+\.)?(whl|lock)({re.escape(PART)})?"
    )  # not of 1.0.1 for 1.0
    rest = [each for each in home.parent.glob(".*") if begun.fullmatch(each.name)]
    if not home.exists() and not rest:
        raise StartupError(f"{name}: it is not on this machine; tureen list shows those that are")
    if reference.tag and path is not None:
        _remove_tagged(path, home)
    else:
        shutil.rmtree(home, ignore_errors=True)
    before += sum(each.stat().st_size for each in rest)
    for each in rest:
        each.unlink()
    if reference.tag == "" and home.exists():
        raise StartupError(f"{name}: {home} cannot be removed; check its owner, and whether the disk is writable")
    return home, before - _bytes_of(home)


def _home_of(reference: names.Reference, config: Config) -> Path:
    """Returns the folder that holds a model that is not a path."""
    own = cache_dir(config)
    if reference.kind == "hub":
        return hub_root(config) / ("models--" + reference.name.replace("/", "--"))
    if reference.kind == "wheel":
        return kept.home_of(kept.parse(reference.name).requirement, own)
    model = shelf().models[reference.name]
    if model.recipe:
        return own / BUILT_FOLDER / model.recipe
    return kept.home_of(kept.parse(model.source).requirement if model.source else reference.name.replace(":", "-"), own)


def _remove_tagged(path: Path, home: Path) -> None:
    """Removes one of several GGUF models of a repository: its links, and the blobs that they alone lead to."""
    for name in ggufs.parts(path.name):
        link = path.with_name(name)
        blob = Path(os.path.realpath(link))
        link.unlink()
        if not any(os.path.realpath(other) == str(blob) for other in home.glob("snapshots/**/*")):
            blob.unlink(missing_ok=True)


def _bytes_of(folder: Path) -> int:
    """Returns the bytes of the files below a folder; links count nothing."""
    files = (path for path in folder.rglob("*") if not path.is_symlink() and path.is_file())
    return sum(path.stat().st_size for path in files)
