"""Serves vLLM's `/inference/v1/generate`: token ids in, token ids out.

Source: https://docs.vllm.ai/en/latest/serving/online_serving/token_in_token_out
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.params import EMPTY_IS_UNSET, INT64_MAX, INT64_MIN, SamplingParams
from tureen.contract.types import LEAST_LOGPROB, LogprobSpec, PositionLogprobs
from tureen.errors import InvalidRequest
from tureen.fields.body import TEXT_LISTS, convert, offered, require_equal
from tureen.fields.constraints import StructuredOutputs, add_constraints, structured_constraints
from tureen.fields.processor import check_processor
from tureen.fields.rules import read_tables
from tureen.fields.shared import MAX_TOP_LOGPROBS, CacheSalt, TokenIds
from tureen.http.dialect import Docs, Entry, client_name, prepared, read_body_with, streamed, unless_gone
from tureen.http.errors import error_object
from tureen.http.sse import event
from tureen.requests import planning
from tureen.requests.drafts import ALL, Options, Plan, check_all_fit, one_prompt, plan_of
from tureen.requests.explanations import version_ranges
from tureen.requests.generation import Output, Run, Sent
from tureen.requests.model_field import adapter_of
from tureen.requests.offload import offload
from tureen.requests.planning import Names
from tureen.requests.prompts import id_lists
from tureen.requests.state import Context, ServerState

DEFAULT_MAX_TOKENS = 16
ALIASES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""vLLM's names of sampling parameters -> those of SamplingParams."""

OWN = ("structured_outputs", "logprobs", "prompt_logprobs")
TABLES = read_tables(Path(__file__).with_name("fields.toml"))
DONE = event(b"[DONE]")

_json = msgspec.json.Encoder()

Answer = dict[str, Any]
Top = Annotated[int, Meta(ge=ALL, le=MAX_TOP_LOGPROBS)]
Length = Annotated[int, Meta(ge=0, le=INT64_MAX)]


class VllmParams(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `sampling_params`: vLLM's names, and our own."""

    max_tokens: Annotated[Length | None, Meta(description="Most tokens to generate.")] = DEFAULT_MAX_TOKENS
    min_tokens: Annotated[Length, Meta(description="Fewest tokens to generate.")] = 0
    seed: Annotated[
        Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None,
        Meta(description="Same request, same seed, same tokens. Default: random."),
    ] = None
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the tokens of a stop string.")] = False
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="vLLM's constraints.")] = None
    logprobs: Annotated[
        Top | None,
        Meta(description="Return log-probabilities of each token, and of this many best alternatives; -1 = all."),
    ] = None
    prompt_logprobs: Annotated[Top | None, Meta(description="The same for the prompt's tokens.")] = None


class VllmTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /inference/v1/generate`."""

    token_ids: Annotated[TokenIds, Meta(description="The prompt's token ids.")]
    sampling_params: Annotated[VllmParams, Meta(description="Sampling parameters.")] = VllmParams()
    request_id: Annotated[str | None, Meta(description="A name for the request. Default: random.")] = None
    model: Annotated[str | None, Meta(description="The served model, or an adapter.")] = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] = False
    custom_logit_processor: Annotated[
        str | None, Meta(description="A processor's name, or one sent as code; see the processors page.")
    ] = None
    cache_salt: CacheSalt = ""
    priority: Annotated[
        int, Meta(ge=-(2**31), le=2**31 - 1, description="Lower runs first; needs --enable-priority-scheduling.")
    ] = 0


def routes(state: ServerState) -> list[Entry]:
    """Return the route."""

    async def generate(request: Request) -> ASGIApp:
        state.check_accepting()
        payload, body = await read_body_with(request, lambda sent: (sent, _read(sent)))
        run = Run(state, await prepared(request, _plan(body, payload, client_name(request), state)))
        name = body.request_id or run.outputs[0].rid
        if body.stream:
            pieces = _events(run, name, body.sampling_params.logprobs)
            return await streamed(request, pieces, lambda error: event(_json.encode(error_object(error))), end=DONE)
        outputs = await unless_gone(request, run.whole())
        size = sum(output.num_logprobs for output in outputs)
        answer = await offload.run(size, lambda: _whole(outputs, name, body, state.context))
        return Response(_json.encode(answer), media_type="application/json")

    docs = Docs(
        "vLLM",
        "Continue token ids.",
        bodies=(VllmTokensBody,),
        example={"token_ids": [65, 66, 67], "sampling_params": {"max_tokens": 8, "logprobs": 0}},
        stream="text/event-stream",
    )
    return [Entry("/inference/v1/generate", generate, access="user", methods=["POST"], docs=docs)]


def _read(payload: dict[str, Any]) -> VllmTokensBody:
    """Check a body's form. Raises InvalidRequest."""
    where, known = "sampling_params", VllmParams.__struct_fields__
    fields = offered(payload, VllmTokensBody.__struct_fields__, TABLES["body"], inside=known, at=where)
    params = fields.get(where)
    if isinstance(params, dict):
        kept = offered(params, known, TABLES[where], where)
        fields[where] = {
            name: [value] if name in TEXT_LISTS and isinstance(value, str) else value for name, value in kept.items()
        }
    body = convert(fields, VllmTokensBody, table=TABLES["sampling_params"])
    if body.stream and body.sampling_params.prompt_logprobs is not None:
        field = "sampling_params.prompt_logprobs"
        raise InvalidRequest(f"{field} cannot go with stream; leave one out", field=field)
    return body


def _sampling_fields(params: VllmParams, sent: dict[str, Any]) -> tuple[dict[str, Any], Names]:
    """Return the sampling parameters that the body sets, and its names for them. Raises InvalidRequest."""
    fields: dict[str, Any] = {}
    renamed = {parameter: name for name, parameter in ALIASES.items()}
    for name, value in sent.items():
        if name not in VllmParams.__struct_fields__ or name in OWN or (value is None and name != "max_tokens"):
            continue
        target = ALIASES.get(name, name)
        if value == "" and target in EMPTY_IS_UNSET:
            continue
        sent_value = None if value is None else getattr(params, name)
        other = f"sampling_params.{renamed.get(target, target)}"
        require_equal(f"sampling_params.{name}", sent_value, other, fields.setdefault(target, sent_value))
        renamed[target] = name
    if fields.get("top_k") == 0:
        fields["top_k"] = -1
    if params.structured_outputs is not None:
        add_constraints(structured_constraints(params.structured_outputs), fields, renamed, None)
    return fields, Names("sampling_params", renamed)


async def _plan(body: VllmTokensBody, payload: dict[str, Any], owner: str, state: ServerState) -> Plan:
    """Make the requests. Raises InvalidRequest, NotFound."""
    context, params = state.context, body.sampling_params
    planning.check_priority(body.priority, context)
    if body.request_id is not None:
        planning.check_rid(body.request_id, "request_id")
    fields, names = _sampling_fields(params, payload.get("sampling_params") or {})
    sampling = planning.make_sampling(fields, context, names, {"max_new_tokens": DEFAULT_MAX_TOKENS})
    [prompt] = id_lists(body.token_ids, context, may_be_empty=False, field="token_ids")
    name = body.custom_logit_processor
    options = Options(
        adapter=adapter_of(body.model, state),
        processor="" if name is None else check_processor(name, context.config, "custom_logit_processor"),
        logprobs=_spec(params, context.info.vocab_size),
        priority=-body.priority,
        cache_salt=body.cache_salt,
    )
    draft = one_prompt(prompt, "token_ids", sampling, options, owner=owner, rid=body.request_id)
    plan = plan_of(draft, state)
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(params, field) == ALL:
            check_all_fit(plan.requests, f"sampling_params.{field}")
    return plan


def _spec(params: VllmParams, vocab_size: int) -> LogprobSpec | None:
    """Return the log-probabilities to compute; None = none."""
    counts = [count for count in (params.logprobs, params.prompt_logprobs) if count is not None]
    if not counts:
        return None
    most = vocab_size if ALL in counts else max(counts)
    return LogprobSpec(-1 if params.prompt_logprobs is None else 0, most, mode="raw")


def _whole(outputs: Sequence[Output], name: str, body: VllmTokensBody, context: Context) -> Answer:
    top = body.sampling_params.prompt_logprobs
    prompt = None if top is None else [_of_prompt(entry, top, context) for entry in outputs[0].prompt_logprobs]
    choices = [_choice(output, 0, body.sampling_params.logprobs) for output in outputs]
    return {"request_id": name, "choices": choices, "prompt_logprobs": prompt, "kv_transfer_params": None}


def _choice(output: Output, first: int, top: int | None) -> Answer:
    """Return a choice with the tokens from index `first` on. `top`: best tokens of each position; None = no
    log-probabilities."""
    shown = None
    if top is not None:
        shown = {"content": [_of_token(position, top) for position in output.output_logprobs[first:]]}
    choice: Answer = {
        "index": output.index,
        "token_ids": output.token_ids[first:],
        "finish_reason": None if output.finish is None else output.finish.type,
        "logprobs": shown,
    }
    if output.finish is None:
        return choice
    return choice | {"weight_version_ranges": version_ranges(output)} | output.constraint_notes


def _of_token(position: PositionLogprobs, top: int) -> Answer:
    value, token_id = position.token
    best = [_named(other, logprob) for logprob, other in (position.top or ())[: _shown(top)] if logprob is not None]
    return _named(token_id, value) | {"top_logprobs": best}


def _shown(top: int) -> int | None:
    """Return how many alternatives are shown; None = all."""
    return None if top == ALL else top


def _named(token_id: int, logprob: float | None) -> Answer:
    """Return a token by its id, as vLLM names it."""
    return {"token": f"token_id:{token_id}", "logprob": LEAST_LOGPROB if logprob is None else logprob, "bytes": None}


def _of_prompt(position: PositionLogprobs, top: int, context: Context) -> dict[str, Answer] | None:
    """Return the log-probabilities at a token of the prompt, by token id; None for the first, which has none."""
    if position.token[0] is None:
        return None
    ranks = {token_id: rank for rank, (_, token_id) in enumerate(position.top or (), 1)}
    values = {token_id: value for value, token_id in (position.top or ())[: _shown(top)]} | {
        position.token[1]: position.token[0]
    }
    return {
        str(token_id): {
            "logprob": value,
            "rank": ranks.get(token_id),
            "decoded_token": context.tokenizer.token_text(token_id),
        }
        for token_id, value in values.items()
    }


async def _events(run: Run, name: str, top: int | None) -> AsyncGenerator[bytes, None]:
    """Yield an event with the new tokens of each update. `top`: as in `_choice`."""
    async with aclosing(run.events()) as events:
        async for update in events:
            output = update.output
            if len(output.token_ids) == output.sent.tokens and output.finish is None:
                continue
            choice = _choice(output, output.sent.tokens, top)
            output.sent = Sent(len(output.token_ids), len(output.text))
            yield event(_json.encode({"request_id": name, "choices": [choice]}))
