"""Turns a draft, which any API makes from a body, into engine requests. No other module makes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tureen.clients.quotas import current_work
from tureen.config import Config
from tureen.contract.params import CONSTRAINTS, JsonObject, SamplingParams
from tureen.contract.types import GenerateRequest, HiddenStates, LogprobSpec, MediaItem
from tureen.errors import ContextExceeded, InvalidRequest
from tureen.fields import ignored
from tureen.fields.shared import MAX_TOP_LOGPROBS
from tureen.grammar.base import GrammarSpec
from tureen.grammar_service.availability import why_unconstrained
from tureen.requests.output_parser import PLAIN, Reading
from tureen.requests.planning import Sampling, name_requests
from tureen.requests.prompts import Prompt, too_long
from tureen.requests.state import Context, ServerState

ALL = -1
"""Number of alternatives that means the whole vocabulary, as in vLLM."""
MAX_LOGPROBS = 1 << 20
"""Most log-probabilities of an answer that asks for the whole vocabulary; as JSON they take some 50 MB."""

SEED_BITS = 52
"""Bits of a seed that the server draws. With a sample's index added it is still exact as a float64, the only number
type of JavaScript clients."""

REQUEST_SIZE = 32
"""Cost of making one request for `offload`: as long as tokenizing this many characters."""

MAX_EXPLAINED_TOKENS = 1 << 14
"""Maximum number of explained tokens in one answer; each takes some 2 KB as JSON."""

DTYPES = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "bool": "(True|False)",
    "str": r'"[\w\d\s]*"',
}
DTYPE_STOPS = {"int": (" ", "\n"), "float": (" ", "\n")}
"""Stop strings for the parameter `dtype`; with the regexes in DTYPES they are those of SGLang's frontend language."""


EffectiveParams = Mapping[str, Mapping[str, Any]]
"""Effective sampling parameters: the `value` of each, and under `from` its origin."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one prompt's requests besides their sampling parameters."""

    adapter: str = ""  # name or path of a loaded LoRA adapter; "" = none
    logprobs: LogprobSpec | None = None
    hidden_states: HiddenStates = "none"
    processor: str = ""
    return_effective: bool = False
    explain: bool = False
    reports_progress: bool = False
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: int | None = None  # wall clock, from when the draft is made into requests
    ttft_deadline_ms: int | None = None


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one body, each with its sampling parameters and options, before they become requests."""

    prompts: Sequence[Prompt]
    names: Sequence[str]  # of each prompt, for errors
    samplings: Sequence[Sampling]  # of each prompt
    options: Sequence[Options]  # of each prompt
    owner: str = ""  # the client, which alone may abort the requests by name; "" = anonymous
    rid: str | list[str] | None = None
    is_batch: bool = False  # the body has a list of prompts
    log_metrics: bool = True
    arrived_s: float = msgspec.field(default_factory=lambda: time.monotonic())  # when the body arrived, monotonic time
    error_fields: Mapping[str, str] = {}  # a path in errors about the constraint -> the client's field


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one body, ready to run: all samples of the first prompt, then those of the second, and so on."""

    requests: tuple[GenerateRequest, ...]
    rids: tuple[str, ...]  # each request's name in answers
    names: dict[str, tuple[int, ...]]  # name that a client may abort by -> indices into requests
    owner: str = ""
    log_metrics: bool = True
    arrived_s: float = msgspec.field(default_factory=lambda: time.monotonic())
    media: list[tuple[MediaItem, ...]] = []
    """Pictures and videos of each request. They are separate because a Run takes them out, so a stored plan holds no
    pixels."""
    error_fields: Mapping[str, str] = {}
    effective: Mapping[int, EffectiveParams] = {}  # of the requests that ask for it, by their index
    reading: Reading = PLAIN
    first_index: int = 0  # of its outputs among those of the answer


def one_prompt(prompt: Prompt, name: str, sampling: Sampling, options: Options, **further: Any) -> Draft:
    """Makes the draft of a body with one prompt. `further`: additional fields of Draft."""
    return Draft(prompts=(prompt,), names=(name,), samplings=(sampling,), options=(options,), **further)


def plan_of(draft: Draft, state: ServerState) -> Plan:
    """Makes the requests of a draft; nothing is submitted yet. Raises InvalidRequest."""
    num_samples = draft.samplings[0].params.n
    resolved_prompts = [_resolved(draft, index, state.context) for index in range(len(draft.prompts))]
    names, rids = name_requests(draft.rid, len(draft.prompts), num_samples, is_batch=draft.is_batch)
    requests: list[GenerateRequest] = []
    for index, resolved in enumerate(resolved_prompts):
        requests += _requests(draft, index, resolved, rids[len(requests) : len(requests) + num_samples], state)
    _check_explained(requests)
    return Plan(
        requests=tuple(requests),
        rids=rids,
        names=names,
        owner=draft.owner,
        log_metrics=draft.log_metrics,
        arrived_s=draft.arrived_s,
        media=[prompt.media for prompt in draft.prompts for _ in range(num_samples)],
        error_fields=draft.error_fields,
        effective={
            index: effective_params(request, draft.samplings[index // num_samples], state.context)
            for index, request in enumerate(requests)
            if draft.options[index // num_samples].return_effective
        },
    )


def _check_explained(requests: Sequence[GenerateRequest]) -> None:
    """Raises InvalidRequest for more explanations than an answer may have."""
    num_tokens = sum(request.max_new_tokens for request in requests if request.explain)
    if num_tokens > MAX_EXPLAINED_TOKENS:
        raise InvalidRequest(
            f"explain: true could explain {num_tokens} tokens; at most {MAX_EXPLAINED_TOKENS} fit an answer: lower the "
            "limit of the output, or send fewer prompts or samples",
            field="explain",
        )


def request_of(draft: Draft, index: int, rid: str, state: ServerState) -> GenerateRequest:
    """Makes the only request of the draft's prompt `index`, named `rid` in answers. Raises InvalidRequest."""
    [request] = _requests(draft, index, _resolved(draft, index, state.context), (rid,), state)
    return request


class GrammarConstraint(NamedTuple):
    """The grammar that an output must match, and the sampling parameters with the stop strings that it adds."""

    params: SamplingParams
    grammar: GrammarSpec | None = None
    field: str = ""  # the client's name for it


class Resolved(NamedTuple):
    """The sampling of one prompt that depends on the prompt's length and the server's settings."""

    constraint: GrammarConstraint
    max_new_tokens: int
    limit_field: str  # the client's name of max_new_tokens, if it sent it
    custom_params: Sequence[JsonObject | None]  # of each sample


def _resolved(draft: Draft, index: int, context: Context) -> Resolved:
    """Raises InvalidRequest."""
    sampling = draft.samplings[index]
    _check_may_begin(sampling, context)
    custom_params = _custom_params(draft, index)
    if any(custom_params) and not draft.options[index].processor:
        field = sampling.names.path("custom_params")
        raise InvalidRequest(f"{field} needs custom_logit_processor, which reads it", field=field)
    constraint = constrained(sampling.params, sampling.names.path, context.config)
    if constraint.grammar is None and not sampling.params.close_early and sampling.origins["close_early"] == "request":
        ignored.tell(sampling.names.path("close_early"), "it applies only to constrained outputs")
    num_prompt = len(draft.prompts[index].token_ids)
    limit_field = sampling.names.path("max_new_tokens") if _sends_limit(sampling) else ""
    most = _max_new_tokens(sampling, draft.names[index], num_prompt, context)
    return Resolved(constraint, most, limit_field, custom_params)


def _check_may_begin(sampling: Sampling, context: Context) -> None:
    """Raises InvalidRequest if no token is allowed before the output may end."""
    params = sampling.params
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else context.info.eos_token_ids)}
    if params.min_new_tokens and params.allowed_token_ids is not None and ends.issuperset(params.allowed_token_ids):
        field, least = sampling.names.path("allowed_token_ids"), sampling.names.path("min_new_tokens")
        raise InvalidRequest(f"{field} has only tokens that end the output, which {least} does not allow", field=field)
    if sampling.banned is not None and params.allowed_token_ids is not None:
        banned = {sequence[0] for sequence in sampling.banned.sequences if len(sequence) == 1}
        if banned.issuperset(params.allowed_token_ids):
            field = sampling.banned.field
            allowed = sampling.names.path("allowed_token_ids")
            raise InvalidRequest(f"{field} forbids all tokens of {allowed}; leave one of the two out", field=field)


def _custom_params(draft: Draft, index: int) -> Sequence[JsonObject | None]:
    """Returns the custom_params of each sample of a prompt. Raises InvalidRequest.

    A list has an entry for each prompt, or for each output: all samples of the first prompt, then those of the second.
    A list among a single prompt's own sampling parameters is about that prompt alone.
    """
    sampling = draft.samplings[index]
    values, num_samples = sampling.params.custom_params, sampling.params.n
    if not isinstance(values, tuple):
        return [values] * num_samples
    is_shared = draft.samplings[0] is draft.samplings[-1]
    batch, place = (len(draft.prompts), index) if is_shared else (1, 0)
    if len(values) == batch:
        return [values[place]] * num_samples
    if len(values) == batch * num_samples:
        return values[place * num_samples : (place + 1) * num_samples]
    field, outputs = sampling.names.path("custom_params"), batch * num_samples
    raise InvalidRequest(
        f"{field} has {len(values)} entries; send one for each of the {batch} prompts"
        + (f", or for each of the {outputs} outputs" if num_samples > 1 else ""),
        field=field,
    )


def _sends_limit(sampling: Sampling) -> bool:
    return sampling.origins.get("max_new_tokens") == "request" and sampling.params.max_new_tokens is not None


def _requests(
    draft: Draft, index: int, resolved: Resolved, rids: Sequence[str], state: ServerState
) -> list[GenerateRequest]:
    """Makes the requests of one prompt, one for each of its samples, without its pixels."""
    prompt, options = draft.prompts[index], draft.options[index]
    (params, grammar, grammar_field), token_ids = resolved.constraint, tuple(prompt.token_ids)
    seed = state.context.draw_bits(SEED_BITS) if params.sampling_seed is None else params.sampling_seed
    cache_salt = cache_namespace(draft.owner, options.cache_salt)
    work = current_work()
    weight = work.account.limits.weight
    return [
        GenerateRequest(
            id=state.new_id(rid),
            token_ids=token_ids,
            params=_with_custom(params, resolved.custom_params[sample]),
            max_new_tokens=resolved.max_new_tokens,
            seed=(seed + sample + 2**63) % 2**64 - 2**63,
            logprobs=options.logprobs,
            cache_salt=cache_salt,
            client=draft.owner,
            client_weight=weight,
            adapter=options.adapter,
            embeds=prompt.embeds,
            second_start=prompt.second_start,
            hidden_states=options.hidden_states,
            explain=options.explain,
            timed=work.trace is not None,
            reports_progress=options.reports_progress,
            processor=options.processor,
            banned=draft.samplings[index].banned,
            grammar=grammar,
            grammar_field=grammar_field,
            limit_field=resolved.limit_field,
            priority=options.priority,
            when_idle=work.when_idle,
            deadline_ms=_left(options.deadline_ms, work.load_wait_s),
            ttft_deadline_ms=_left(options.ttft_deadline_ms, work.load_wait_s),
        )
        for sample, rid in enumerate(rids)
    ]


def _left(limit_ms: int | None, waited_s: float) -> int | None:
    """Returns the rest of a limit in milliseconds after `waited_s`."""
    return limit_ms if limit_ms is None or not waited_s else max(1, limit_ms - round(waited_s * 1000))


def _with_custom(params: SamplingParams, custom_params: JsonObject | None) -> SamplingParams:
    is_list = isinstance(params.custom_params, tuple)
    return msgspec.structs.replace(params, custom_params=custom_params) if is_list else params


def cache_namespace(owner: str, salt: str = "") -> str:
    """Returns the namespace of a request's cached prefixes. No `salt` of one client gives the namespace of another."""
    return f"{owner}\n{salt}" if owner or salt else ""


def salt_of(salt: str, extra_key: str | Sequence[str] | None) -> str:
    """Returns the salt of a request's prefix cache: the salt and the extra keys together."""
    if extra_key is None:
        return salt
    return "\0".join((salt, *([extra_key] if isinstance(extra_key, str) else extra_key)))


def _max_new_tokens(sampling: Sampling, prompt_name: str, num_prompt: int, context: Context) -> int:
    """Returns the maximum number of output tokens. A default is limited by the context. Raises InvalidRequest."""
    room = context.capacity - num_prompt
    requested = sampling.params.max_new_tokens
    if room < (0 if requested == 0 else 1):
        raise too_long(num_prompt, prompt_name, context)
    field = sampling.names.path("max_new_tokens")
    if requested is not None and requested > room and sampling.origins.get("max_new_tokens") == "request":
        raise ContextExceeded(
            f"{field}: the prompt's {num_prompt} tokens and {field.split('.')[-1]} {requested} make "
            f"{num_prompt + requested}, more than the maximum context length of {context.capacity} tokens; lower it to "
            f"at most {room}"
            + (", or send null for up to the context end" if field.endswith("max_new_tokens") else ""),
            field=field,
            num_tokens=num_prompt + requested,
            capacity=context.capacity,
        )
    resolved = room if requested is None else min(requested, room)
    if sampling.params.min_new_tokens > resolved:
        field = sampling.names.path("min_new_tokens")
        raise InvalidRequest(
            f"{field} is {sampling.params.min_new_tokens}, but only {resolved} tokens fit the context", field=field
        )
    return resolved


def effective_params(request: GenerateRequest, sampling: Sampling, context: Context) -> EffectiveParams:
    """Returns every effective sampling parameter of a request. Its origin is request, server, model or default."""
    values: dict[str, Any] = msgspec.structs.asdict(sampling.params)
    origins: dict[str, str] = dict(sampling.origins)
    if request.max_new_tokens != sampling.params.max_new_tokens:
        origins["max_new_tokens"] = "model"  # lowered to the rest of the context
    if sampling.params.stream_interval is None and context.config.stream_interval != 1:
        origins["stream_interval"] = "server"
    values |= {
        "max_new_tokens": request.max_new_tokens,
        "custom_params": request.params.custom_params,
        "sampling_seed": request.seed,
        "stream_interval": sampling.params.stream_interval or context.config.stream_interval,
    }
    return {name: {"value": value, "from": origins.get(name, "default")} for name, value in values.items()}


def constrained(params: SamplingParams, path: Callable[[str], str], config: Config) -> GrammarConstraint:
    """Returns the constraint among a request's parameters, of which there is at most one. Raises InvalidRequest.

    `path` returns what errors call a parameter.
    """
    name = next((name for name in CONSTRAINTS if getattr(params, name) is not None), None)
    if name is None:
        return GrammarConstraint(params)
    field = path(name)
    if config.grammar_backend == "none":
        raise InvalidRequest(f"{field}: the server runs with --grammar-backend none; leave it out", field=field)
    if why := why_unconstrained():
        raise InvalidRequest(f"{field}: {why}", field=field)
    spec = _spec(name, params, config)
    if params.dtype is not None:
        stops = params.stop + DTYPE_STOPS.get(params.dtype, ())
        most = config.max_stop_strings
        if len(stops) > most:
            more = len(stops) - len(params.stop)
            raise InvalidRequest(
                f"{path('stop')} takes at most {most - more} entries with dtype {params.dtype}, which adds {more} "
                f"of its own, got {len(params.stop)}",
                field=path("stop"),
            )
        params = msgspec.structs.replace(params, stop=stops)
    return GrammarConstraint(params, spec, field)


def _spec(name: str, params: SamplingParams, config: Config) -> GrammarSpec:
    value = getattr(params, name)
    if name == "dtype":
        name, value = "regex", DTYPES[value]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return GrammarSpec(name, text, params.grammar_after, params.strict_schema, config.regex_unicode)  # type: ignore[arg-type]


def check_all_fit(requests: Sequence[GenerateRequest], field: str) -> None:
    """Raise InvalidRequest if the answer could have too many log-probabilities, because `field` is -1."""
    count = sum(_num_logprobs(request) for request in requests)
    if count > MAX_LOGPROBS:
        raise InvalidRequest(
            f"{field}: -1 could return {count} log-probabilities; at most {MAX_LOGPROBS} fit an answer: lower the "
            f"limit of the output, send a shorter prompt, or ask for 0 to {MAX_TOP_LOGPROBS}",
            field=field,
        )


def _num_logprobs(request: GenerateRequest) -> int:
    """Return the most alternatives that an answer has for a request."""
    spec = request.logprobs
    if spec is None:
        return 0
    num_prompt = len(request.token_ids) - spec.prompt_start if spec.prompt_start >= 0 else 0
    return spec.top * (num_prompt + request.max_new_tokens)
