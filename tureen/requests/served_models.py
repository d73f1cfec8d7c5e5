"""Describes the models of a server that has several, as the routes see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tureen.config import Config

if TYPE_CHECKING:
    from tureen.requests.state import ServerState

Standing = Literal["unloaded", "loading", "loaded", "unloading"]


class ServedModel(Protocol):
    """One of several models."""

    name: str
    config: Config
    standing: Standing
    state: ServerState | None  # None: it was never loaded
    need_bytes: int  # of memory; 0 = not known yet

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that requests may ask for: name -> path."""

    def report(self) -> dict[str, Any]:
        """Returns what `/status` says of it."""


class ServedModels(Protocol):
    """All models of a server that has several; the first is the default model."""

    @property
    def members(self) -> Sequence[ServedModel]:
        """The models, in the order of the settings."""

    def find(self, name: str) -> ServedModel | None:
        """Returns the model that a request's `model` means; None: there is none."""

    def names(self) -> list[str]:
        """Returns the names that requests may use: models and their adapters."""

    async def load(self, name: str) -> ServedModel:
        """Loads a model; one that is not in the list yet joins it. Raises TureenError."""

    async def unload(self, name: str) -> ServedModel:
        """Unloads a model that nobody uses. Raises NotFound, Conflict."""

    async def pull(self, name: str) -> ServedModel:
        """Fetches a model's files, without loading it; it joins the list. Raises TureenError."""

    def retire(self, state: ServerState) -> None:
        """Unloads the model of a state when the requests that use it have their answers."""

    def report(self) -> dict[str, Any]:
        """Returns what `/status` says of all."""
