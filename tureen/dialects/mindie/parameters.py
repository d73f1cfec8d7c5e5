"""Declares the `parameters` of MindIE's `/infer` and `/v2/models/NAME/…`, and makes requests of them.

Source: https://www.hiascend.com/document/detail/zh/mindie/10RC3/mindieservice/servicedev/mindie_service0266.html
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tureen.contract.types import FinishReason
from tureen.errors import InvalidRequest
from tureen.fields import ignored
from tureen.fields.body import offered
from tureen.fields.rules import FieldTable, read_tables
from tureen.http.chat_answer import check_complete
from tureen.requests import planning
from tureen.requests.drafts import Options, Plan, one_prompt, plan_of
from tureen.requests.generation import Output, Run, Sent
from tureen.requests.planning import Names
from tureen.requests.prompts import Prompt
from tureen.requests.state import ServerState

DEFAULT_MAX_NEW_TOKENS = 20
LEAST_URGENT = 5
"""The priority of a request that names none; 1 runs first."""

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "typical_p")
NAMES = Names("parameters", {"sampling_seed": "seed"})
TABLES = read_tables(Path(__file__).with_name("fields.toml"))


class MindieParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `parameters`."""

    temperature: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="Higher = more varied.")] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None, Meta(description="Keep the k most probable tokens.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Keep the smallest set of tokens whose probability reaches it."),
    ] = None
    typical_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Keep the tokens whose surprise is nearest the expected one."),
    ] = None
    do_sample: Annotated[
        bool | None,
        Meta(description="Sample; false takes the best token. Default: sample if a sampling parameter is set."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(description="Same request, same seed, same tokens. Default: random."),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=2)] | None,
        Meta(description="Tokens of prompt and output: above 1 less likely, below 1 more."),
    ] = None
    max_new_tokens: Annotated[
        int, Meta(ge=1, le=2**31 - 1, description="Most tokens to generate, at most --max-iter-times.")
    ] = DEFAULT_MAX_NEW_TOKENS
    details: Annotated[bool, Meta(description="Return the output's finish reason, its length and the seed.")] = False
    priority: Annotated[int, Meta(ge=1, le=5, description="1 runs first; needs --enable-priority-scheduling.")] = (
        LEAST_URGENT
    )
    timeout: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None, Meta(description="Seconds after which the request fails.")
    ] = None


def offered_fields(payload: dict[str, Any], known: Collection[str], table: FieldTable) -> dict[str, Any]:
    """Return a body's fields, and those of `parameters`, that are to be converted. Raises InvalidRequest."""
    names = MindieParameters.__struct_fields__
    fields = offered(payload, known, table, inside=names, at="parameters")
    parameters = fields.get("parameters")
    if isinstance(parameters, dict):
        fields["parameters"] = offered(parameters, names, TABLES["parameters"], "parameters")
    return fields


def plan(
    parameters: MindieParameters,
    prompt: Prompt,
    name: str,
    owner: str,
    state: ServerState,
    *,
    rid: str | None = None,
    adapter: str = "",
) -> Plan:
    """Make the request. `name`: what errors call the prompt; `rid`: the client's name for it. Raises InvalidRequest."""
    context = state.context
    requested = {
        field: getattr(parameters, field)
        for field in (*SAMPLING_FIELDS, "repetition_penalty")
        if getattr(parameters, field) is not None
    }
    if parameters.seed is not None:
        requested["sampling_seed"] = parameters.seed
    most = context.config.max_iter_times
    defaults: dict[str, Any] = {
        "max_new_tokens": parameters.max_new_tokens if most is None else min(most, parameters.max_new_tokens)
    }
    samples = parameters.do_sample
    if samples is None:
        samples = any(field in requested for field in SAMPLING_FIELDS)
    if not samples:
        requested["temperature"] = 0.0
    sampling = planning.make_sampling(requested | defaults, context, NAMES)
    deadline_ms = None if parameters.timeout is None else parameters.timeout * 1000
    options = Options(adapter=adapter, priority=_priority(parameters, state), deadline_ms=deadline_ms)
    return plan_of(one_prompt(prompt, name, sampling, options, owner=owner, rid=rid), state)


def _priority(parameters: MindieParameters, state: ServerState) -> int:
    """Return the priority of the request; reports one that has no effect on this server."""
    if parameters.priority == LEAST_URGENT:
        return 0
    if not state.context.config.enable_priority_scheduling:
        ignored.tell("parameters.priority", "the server runs without --enable-priority-scheduling")
        return 0
    return LEAST_URGENT - parameters.priority


def check_one(first: Any, second: Any, names: tuple[str, str]) -> None:
    """Raise InvalidRequest unless one of two fields is sent."""
    if (first is None) == (second is None):
        got = "neither" if first is None else "both"
        raise InvalidRequest(f"Input conflict: send either {names[0]} or {names[1]}, got {got}", field=names[0])


def finish_reason(finish: FinishReason | None) -> str | None:
    """Return why the output ended; None = it goes on."""
    if finish is None or finish.type == "length":
        return None if finish is None else "length"
    return "stop_sequence" if isinstance(finish.matched, str) else "eos_token"


def details_of(output: Output) -> dict[str, Any]:
    """Return why an output ended, how long it is, and its seed."""
    return {
        "finish_reason": finish_reason(output.finish),
        "generated_tokens": len(output.token_ids),
        "seed": None if output.request.params.is_greedy else output.request.seed,
    }


class MindiePiece(NamedTuple):
    """New tokens of one output in a stream."""

    output: Output
    token_ids: list[int]
    text: str
    times: dict[str, float | None]
    """`prefill_time` of the first piece, `decode_time` of the others, in milliseconds."""


def times_since(last_s: float, output: Output) -> dict[str, float | None]:
    """Return the times of a piece. `last_s`: when the one before was ready, after the request; 0 for the first."""
    ms = round((output.elapsed_s - last_s) * 1000, 3)
    return {"prefill_time": None if last_s else ms, "decode_time": ms if last_s else None}


async def pieces_of(run: Run) -> AsyncGenerator[MindiePiece, None]:
    """Yield a piece for each update with new tokens, and for the end."""
    last_s = 0.0
    async with contextlib.aclosing(run.events(interval=1)) as events:
        async for update in events:
            output, sent = update.output, update.output.sent
            check_complete(output)
            if len(output.token_ids) == sent.tokens and output.finish is None:
                continue
            times, last_s = times_since(last_s, output), output.elapsed_s
            output.sent = Sent(len(output.token_ids), len(output.text))  # before others let the output grow
            yield MindiePiece(output, output.token_ids[sent.tokens :], output.text[sent.chars :], times)
