"""Checks the control operations that fronts ask of an engine, whoever they are: names, types and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tureen.contract.params import INT64_MAX
from tureen.contract.profiles import Activity, NumSteps, Prefix
from tureen.contract.types import PauseMode
from tureen.errors import Forbidden, InvalidRequest, NotFound, echo

MAX_PATH_CHARS = 4096
Text = Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARS)]


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No arguments."""


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to pause."""

    mode: PauseMode


class NewWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of new weights."""

    name: Text
    path: Text
    format: Text
    load_format: Literal["auto", "dummy"] | None


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts of the model's memory."""

    tags: Annotated[list[Literal["kv_cache", "weights"]], Meta(min_length=1, max_length=16)]


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor to look at."""

    name: Annotated[str, Meta(max_length=MAX_PATH_CHARS)]
    truncate_size: Annotated[int, Meta(ge=1, le=INT64_MAX)]


class ProfileOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of a profile."""

    activities: Annotated[list[Activity], Meta(max_length=16)]
    with_stack: bool
    record_shapes: bool


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A profile to record. The engine's own --profile-dir replaces `root`, the front's."""

    root: str
    folder: Annotated[str, Meta(max_length=1024)]
    prefix: Prefix
    num_steps: NumSteps | None
    options: ProfileOptions


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter to load."""

    name: Text
    path: Text


class AdapterName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter to unload."""

    name: Text


CALLS: dict[str, type[msgspec.Struct]] = {
    **dict.fromkeys(("flush_cache", "overview", "stats", "resume", "hold", "let_go"), NoArguments),
    **dict.fromkeys(("stop_profile", "start_expert_record", "stop_expert_record", "take_expert_record"), NoArguments),
    "pause": Pause,
    "update_weights": NewWeights,
    "release_memory": Memory,
    "resume_memory": Memory,
    "weight": Weight,
    "start_profile": Profile,
    "load_adapter": Adapter,
    "unload_adapter": AdapterName,
}
"""The operations and their arguments."""


def checked(op: str, args: dict[str, Any], profile_dir: str | None) -> dict[str, Any]:
    """Return the arguments with which the engine may run an operation.

    profile_dir: the engine's own setting. Raise InvalidRequest, and Forbidden for a profile without that setting.
    """
    kind = CALLS.get(op)
    if kind is None:
        raise NotFound(f"{echo(op)} is not an engine operation; these are: {', '.join(sorted(CALLS))}")
    try:
        msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"operation {op}: {error}") from None
    if op != "start_profile":
        return args
    if not profile_dir:
        raise Forbidden("this engine has no folder for profiles; start it with --profile-dir", code="no_profile_dir")
    return args | {"root": str(Path(profile_dir).expanduser().absolute())}
