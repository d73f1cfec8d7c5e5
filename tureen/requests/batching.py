"""Runs bodies with many short requests in waves: only some are in the queue at a time, so other requests get places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tureen.clients.quotas import current_work
from tureen.contract.types import GenerateRequest
from tureen.errors import DeadlineExceeded, InvalidRequest
from tureen.fields.shared import MAX_INPUTS
from tureen.requests import planning
from tureen.requests.drafts import REQUEST_SIZE, Draft, Options, Plan, request_of
from tureen.requests.generation import Output, Run, most_tokens
from tureen.requests.offload import offload
from tureen.requests.planning import Sampling
from tureen.requests.prompts import Prompt
from tureen.requests.state import ServerState

WAVE = 64
"""Maximum number of requests of one body in the queue at a time."""


class Requester(NamedTuple):
    """The client that sent a body, and its name for the request."""

    owner: str  # "" = anonymous
    rid: str | None = None


def check_count(count: int, field: str) -> None:
    """Raises InvalidRequest with `field` unless there are 1 to MAX_INPUTS entries."""
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(f"{field} must have 1 to {MAX_INPUTS} entries, got {count}", field=field)


def draft_of(
    prompts: Sequence[Prompt], names: Sequence[str], sampling: Sampling, options: Options, requester: Requester
) -> Draft:
    """Makes a draft of prompts with the same options. `names`: what errors call each prompt."""
    count = len(prompts)
    return Draft(
        prompts=prompts, names=names, samplings=[sampling] * count, options=[options] * count, owner=requester.owner
    )


async def run_all(draft: Draft, requester: Requester, state: ServerState) -> list[Output]:
    """Runs a draft's prompts and returns an output for each, in their order. Raises the TureenError of the first that
    fails, DeadlineExceeded when one is aborted."""
    _, [name] = planning.name_requests(requester.rid, 1, 1, is_batch=False)
    count = len(draft.prompts)
    requests = await offload.run_each(
        count * REQUEST_SIZE, lambda index: request_of(draft, index, name, state), range(count)
    )
    runs = [Run(state, _plan(requests[at : at + WAVE], name, requester)) for at in range(0, len(requests), WAVE)]
    current_work().begin(sum(most_tokens(request, 0) for request in requests))
    outputs: list[Output] = []
    is_aborted = False

    def abort(reason: str) -> None:
        nonlocal is_aborted
        is_aborted = True  # read between two waves, when no run has a request to abort
        for run in runs:
            run.abort(reason)

    current_work().names.add(name)
    with state.loading(requester.owner, {name: (0,)}, abort):
        for run in runs:
            outputs += await run.whole()
            if is_aborted or any(output.finish is None or output.finish.type == "abort" for output in run.outputs):
                raise DeadlineExceeded("the request was aborted before it was complete", code="aborted")
    return outputs


def _plan(wave: Sequence[GenerateRequest], name: str, requester: Requester) -> Plan:
    count = len(wave)
    return Plan(requests=tuple(wave), rids=(name,) * count, names={}, owner=requester.owner)
