"""Serves SGLang's `/start_profile` and `/stop_profile`, which record how the engine spends its time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tureen.contract.profiles import MAX_STEPS, Activity, NumSteps
from tureen.errors import Forbidden, InvalidRequest, StartupError
from tureen.http.dialect import Docs, Entry, read_body
from tureen.media.files import is_loopback
from tureen.requests.state import ServerState


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /start_profile`."""

    output_dir: Annotated[str, Meta(max_length=1024, description="Folder below --profile-dir; created if absent.")] = ""
    num_steps: Annotated[
        NumSteps | None,
        Meta(description=f"End after this many steps. Default: at /stop_profile, or after {MAX_STEPS}."),
    ] = None
    activities: Annotated[
        Annotated[list[Activity], Meta(min_length=1, max_length=16)] | None,
        Meta(description="GPU only exists on a GPU. Default: all that exist."),
    ] = None
    with_stack: Annotated[bool | None, Meta(description="Lines of Python that call operations; torch only.")] = None
    record_shapes: Annotated[bool | None, Meta(description="Shapes of the operations' inputs; torch only.")] = None
    profile_prefix: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$|^$", description="Beginning of the file's name.")
    ] = ""
    start_step: Annotated[int | None, Meta(description="Must be null: the profile begins now.")] = None
    profile_by_stage: Annotated[bool, Meta(description="Must be false: a step has no stages.")] = False
    merge_profiles: Annotated[bool, Meta(description="Must be false: there is only one process to record.")] = False


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes. Raises StartupError for a --profile-dir that is no folder."""
    root = profile_root(state.context.config.profile_dir, state.context.config.host)

    async def start(request: Request) -> Response:
        body = await read_body(request, ProfileBody)
        _refuse(body)
        if root is None:
            raise Forbidden("profiles have no folder; start the server with --profile-dir", code="no_profile_dir")
        options = {
            "activities": body.activities or (),
            "with_stack": bool(body.with_stack),
            "record_shapes": bool(body.record_shapes),
        }
        name = await state.client.call(
            "start_profile",
            root=str(root),
            folder=body.output_dir,
            prefix=body.profile_prefix,
            num_steps=body.num_steps,
            options=options,
        )
        return PlainTextResponse(f"Start profiling.\nThe trace will be in {name}, below --profile-dir.\n")

    async def stop(request: Request) -> Response:
        await read_body(request, EmptyBody)
        name = await state.client.call("stop_profile")
        return PlainTextResponse(f"Stop profiling.\nThe trace is in {name}, below --profile-dir.\n")

    starting = Docs("Control", "Record the engine's steps.", (ProfileBody,), {"num_steps": 10}, answer="text/plain")
    stopping = Docs("Control", "End the record.", answer="text/plain")
    return [
        Entry("/start_profile", start, access="admin", methods=["GET", "POST"], docs=starting),
        Entry("/stop_profile", stop, access="admin", methods=["GET", "POST"], docs=stopping),
    ]


class EmptyBody(msgspec.Struct, frozen=True):
    """A body without fields."""


def profile_root(profile_dir: str | None, host: str) -> Path | None:
    """Returns the folder below which profiles may be written, by the settings `profile_dir` and `host`; None = none.

    Without --profile-dir it is the current directory, unless that is `/` or other machines can reach the server.
    Raises StartupError.
    """
    if profile_dir == "":
        return None
    if profile_dir is None:
        here = Path.cwd()
        return here if is_loopback(host) and here != Path("/") else None
    folder = Path(profile_dir).expanduser().absolute()
    if not folder.is_dir():
        raise StartupError(f"--profile-dir {profile_dir}: there is no such folder; make it, or give '' for none")
    return folder


def _refuse(body: ProfileBody) -> None:
    """Raises InvalidRequest for fields of SGLang that are not available."""
    wrong = {
        "start_step": (body.start_step is not None, "the profile begins now"),
        "profile_by_stage": (body.profile_by_stage, "a step computes prompts and outputs together"),
        "merge_profiles": (body.merge_profiles, "there is only one process to record"),
    }
    for name, (is_wrong, reason) in wrong.items():
        if is_wrong:
            raise InvalidRequest(f"{name} is not available: {reason}; leave it out", field=name)
