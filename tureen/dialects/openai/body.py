"""Declares the fields that the bodies of OpenAI's generating routes share, and reads sampling parameters by our names
and by OpenAI's and vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from tureen.config import MAX_N
from tureen.contract.params import EMPTY_IS_UNSET, INT64_MAX, INT64_MIN, SamplingParams
from tureen.contract.types import LogprobSpec
from tureen.dialects.openai.response_format import ResponseFormat, format_constraints
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.body import PARAM_FIELDS, TEXT_LISTS, convert, offered, require_equal
from tureen.fields.constraints import (
    GUIDED,
    GuidedBackend,
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    GuidedSpace,
    GuidedTag,
    RequestedConstraint,
    StructuredOutputs,
    add_constraints,
    structured_constraints,
)
from tureen.fields.known_options import is_off
from tureen.fields.processor import check_processor
from tureen.fields.rules import FieldTable, read_tables
from tureen.fields.shared import (
    MAX_TOP_LOGPROBS,
    CacheSalt,
    Deadline,
    FirstTokenDeadline,
    LogMetrics,
    LogprobsModeField,
    Priority,
    ReturnEffective,
)
from tureen.log import get_logger
from tureen.requests.model_field import adapter_of
from tureen.requests.planning import Names
from tureen.requests.state import Context, ServerState
from tureen.requests.thinking_budget import ReasoningBudget
from tureen.requests.thinking_field import NOT_THINKING, thinking_kwargs
from tureen.text.messages import Tool

T = TypeVar("T", bound="OpenAIBody")

MAX_LABEL_CHARS = 512

Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TopOrAll = Annotated[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS)]
"""A number of alternatives; -1 = the whole vocabulary, as in vLLM."""
Tokens = Annotated[int, Meta(ge=0, le=INT64_MAX)]
TokenLimit = Annotated[int, Meta(ge=-2, le=INT64_MAX)]
"""A value of max_new_tokens; -1 and -2 = up to the context end, as llama.cpp and LM Studio have it."""
ThinkingBudget = Annotated[
    Annotated[int, Meta(ge=1, le=INT64_MAX)] | None,
    Meta(description="Most tokens of reasoning of each choice; the answer follows. For models that think."),
]


class ThinkingSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `thinking`, as several hosted models have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]


Thinking = Annotated[
    ThinkingSwitch | None, Meta(description="`type`: enabled or disabled, for models that can switch reasoning.")
]
IncludeReasoning = Annotated[bool, Meta(description="false: the answer comes without its reasoning.")]

AUDIO_PARTS = ("input_audio", "audio_url", "audio")
"""Types of parts with audio, of OpenAI and vLLM."""

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty",
    "typ_p": "typical_p",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    "grammar": "ebnf",
    **GUIDED,
}
"""OpenAI's, vLLM's and llama.cpp's names of sampling parameters."""

TABLES = read_tables(Path(__file__).with_name("fields.toml"))

log = get_logger("api")


def table_of(route: str) -> FieldTable:
    """Returns the verdicts on the fields of a generating route, one of the tables of fields.toml."""
    return TABLES["common"].joined(TABLES.get(route, FieldTable()))


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `stream_options`."""

    include_usage: Annotated[bool | None, Meta(description="Add a last chunk with the usage and no choices.")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Put the usage so far into every chunk.")] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Chunks are not padded; true is reported.")] = None


class OpenAIBody(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both routes have: sampling parameters by their own names, and these."""

    model: Annotated[
        str | None,
        Meta(description="The served model, an adapter, or MODEL:ADAPTER; see /v1/models. Default: the served model."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None,
        Meta(description="Same request, same seed, same tokens. Default: random, reported."),
    ] = None
    n_predict: Annotated[
        TokenLimit | None,
        Meta(description="llama.cpp's name of max_new_tokens; -1 and -2 = up to the context end."),
    ] = None
    n_cmpl: Annotated[Annotated[int, Meta(ge=1, le=MAX_N)] | None, Meta(description="llama.cpp's name of n.")] = None
    repeat_penalty: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, Meta(description="llama.cpp's name of repetition_penalty.")
    ] = None
    typ_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="llama.cpp's name of typical_p.")] = (
        None
    )
    min_tokens: Annotated[Tokens | None, Meta(description="Another name of min_new_tokens.")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Another name of no_stop_trim.")] = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] = False
    stream_options: Annotated[StreamOptions | None, Meta(description="Options of a stream; needs stream: true.")] = None
    response_format: Annotated[
        ResponseFormat | None, Meta(description="Form of the output: text, JSON, or JSON of a schema.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="vLLM's fields for constrained output.")
    ] = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    guided_structural_tag: GuidedTag = None
    guided_decoding_backend: GuidedBackend = None
    guided_whitespace_pattern: GuidedSpace = None
    grammar: Annotated[str | None, Meta(description="Another name of ebnf.")] = None
    logprobs_mode: LogprobsModeField = "processed"
    user: Annotated[Label | None, Meta(description="Name of the end user; logged at level debug.")] = None
    safety_identifier: Annotated[Label | None, Meta(description="The newer name of user.")] = None
    metadata: Annotated[
        Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)] | None,
        Meta(description="Your own entries, returned in the answer's metadata."),
    ] = None
    service_tier: Annotated[
        Label | None, Meta(description="There is only one tier; the answer names it if the field is sent.")
    ] = None
    rid: Annotated[
        str | None, Meta(description="Id of the answer, by which the request can be aborted. Default: random.")
    ] = None
    request_id: Annotated[str | None, Meta(description="Another name of rid.")] = None
    lora_path: Annotated[
        str | None, Meta(description="Name of a loaded adapter, or the path it was loaded from; or put it in model.")
    ] = None
    custom_logit_processor: Annotated[
        str | None, Meta(description="A processor's name, or one sent as code; see the processors page.")
    ] = None
    log_metrics: LogMetrics = True
    return_effective: ReturnEffective = False
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    deadline_ms: Deadline = None
    ttft_deadline_ms: FirstTokenDeadline = None


class RequestedSampling(NamedTuple):
    """The sampling parameters that a body sets, and the body's names for them."""

    fields: dict[str, Any]  # by the names of SamplingParams
    names: Names


def read(payload: Mapping[str, Any], kind: type[T], table: FieldTable) -> T:
    """Checks a JSON body's form and returns it as `kind`. Raises InvalidRequest. `table`: the verdicts on its
    fields."""
    fields = {
        name: [value] if name in TEXT_LISTS and isinstance(value, str) else value
        for name, value in offered(payload, kind.__struct_fields__, table).items()
        if not (value == "" and ALIASES.get(name, name) in EMPTY_IS_UNSET)
    }
    body = convert(fields, kind, table=table)
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", field="stream_options")
    if options is not None and options.include_obfuscation:
        ignored.tell("stream_options.include_obfuscation", "chunks are not padded")
    if body.service_tier not in (None, "auto", "default"):
        ignored.tell("service_tier", "the server has one tier, default")
    if body.rid is not None and body.request_id is not None:
        require_equal("request_id", body.request_id, "rid", body.rid)
    if body.n_cmpl in (None, 1):
        return body
    if payload.get("n") is not None:
        require_equal("n_cmpl", body.n_cmpl, "n", body.n)
    return msgspec.structs.replace(body, n=body.n_cmpl)


def refuse_audio(kind: object, where: str) -> None:
    """Raises InvalidRequest for a part with audio. `kind`: the type of the part at `where`."""
    if kind in AUDIO_PARTS:
        raise InvalidRequest(
            f"{where}.type {echo(kind)} is not available: audio is not supported; send its text",
            field=f"{where}.type",
            code="not_available",
        )


def budget_of(tokens: int | None, state: ServerState) -> ReasoningBudget | None:
    """Returns the budget of reasoning that a body sets. Reports it as ignored if the model does not think."""
    field = "thinking_token_budget"
    if tokens is not None and state.context.reasoning_format is None:
        ignored.tell(field, NOT_THINKING)
        return None
    return None if tokens is None else ReasoningBudget(tokens, field)


def switch_kwargs(switch: ThinkingSwitch | None, tools: Sequence[Tool], context: Context) -> dict[str, Any]:
    """Returns the chat template's variable that `thinking` sets. Raises InvalidRequest for a model that always
    thinks."""
    if switch is None or switch.type in ("adaptive", "auto"):
        return {}
    return dict(thinking_kwargs(switch.type == "enabled", "thinking.type", tools, context))


def requested_sampling(payload: Mapping[str, Any], body: OpenAIBody, limit_name: str) -> RequestedSampling:
    """Reads the sampling parameters that a body sets.

    `payload`: the body as sent; `limit_name`: the route's name for max_new_tokens, for a body that does not set it.

    Raises InvalidRequest.
    """
    fields: dict[str, Any] = {}
    renamed = {"max_new_tokens": limit_name}
    for name, target in _parameters_sent(payload).items():
        value = None if payload[name] is None else getattr(body, name)
        if target == "max_new_tokens" and (value or 0) < 0:
            value = None
        require_equal(name, value, renamed.get(target, target), fields.setdefault(target, value))
        renamed[target] = name
    add_constraints(_constraints(body), fields, renamed, body.guided_whitespace_pattern)
    return RequestedSampling(fields, Names("", renamed))


def _parameters_sent(payload: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names that set a sampling parameter, each with the parameter's own. Another name at its off value
    gives way to a further name of the same parameter."""
    sent: dict[str, str] = {}
    for name, value in payload.items():
        target = ALIASES.get(name, name)
        is_set = value is not None or name == "max_new_tokens"  # null there: up to the context end
        if target in PARAM_FIELDS and is_set and not (value == "" and target in EMPTY_IS_UNSET):
            sent[name] = target
    counts = Counter(sent.values())
    return {
        name: target
        for name, target in sent.items()
        if counts[target] == 1 or name == target or not is_off(name, payload[name])
    }


def _constraints(body: OpenAIBody) -> Iterator[RequestedConstraint]:
    """Yields the constraints in response_format and structured_outputs. Raises InvalidRequest."""
    if body.response_format is not None:
        yield from format_constraints(body.response_format)
    if body.structured_outputs is not None:
        yield from structured_constraints(body.structured_outputs)


def logprobs_of(body: OpenAIBody, top: int | None, *, prompt_too: bool = False) -> LogprobSpec | None:
    """Returns the log-probabilities to compute. `top`: how many alternatives a position has, None = no
    log-probabilities are asked for; `prompt_too`: also for the prompt's tokens. Raises InvalidRequest."""
    if top is not None:
        return LogprobSpec(0 if prompt_too else -1, top, (), body.logprobs_mode)
    if body.logprobs_mode != "processed":
        raise InvalidRequest("logprobs_mode needs logprobs", field="logprobs_mode")
    return None


def adapter(body: OpenAIBody, state: ServerState) -> str:
    """Returns name or path of the adapter that `model` or `lora_path` names; "" = none. Raises NotFound,
    InvalidRequest."""
    named = adapter_of(body.model, state)
    if body.lora_path is None:
        return named
    state.check_adapter(body.lora_path, "lora_path")
    if named and body.lora_path not in (named, state.adapters[named]):
        raise InvalidRequest("lora_path and model name different adapters; send one", field="lora_path")
    return body.lora_path


def processor(body: OpenAIBody, state: ServerState) -> str:
    """Returns the logit processor that the body names or sends; "" = none. Raises InvalidRequest."""
    name = body.custom_logit_processor
    return "" if name is None else check_processor(name, state.context.config, "custom_logit_processor")


def tell_detail(detail: str | None, field: str) -> None:
    """Tells that a picture is shown more finely than `detail` asks for."""
    if detail not in (None, "auto", "high"):
        ignored.tell(field, "pictures always have the model's full resolution")
