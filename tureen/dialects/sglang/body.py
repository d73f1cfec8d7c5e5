"""Declares the body of SGLang's `/generate` and converts it to requests, without HTTP: tureen.Engine uses it too.

Source: https://docs.sglang.io/basic_usage/native_api.html and sampling_params.html.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tureen.config import MAX_PROMPTS
from tureen.contract.params import ALIASES, INT64_MAX, JsonObject
from tureen.contract.types import EngineInfo, GenerateRequest, HiddenStates, LogprobsMode, LogprobSpec
from tureen.dialects.sglang import thinking
from tureen.dialects.sglang.logprob_fields import LOGPROB_FIELDS, logprob_specs, with_draws
from tureen.errors import InvalidRequest, echo
from tureen.fields.body import PARAM_FIELDS, convert, offered, read_params, refuse_unknown
from tureen.fields.known_options import is_off
from tureen.fields.processor import check_processor
from tureen.fields.rules import read_tables
from tureen.fields.shared import (
    MAX_LOGPROB_IDS,
    MAX_TOKEN_IDS,
    CacheKey,
    Deadline,
    Explain,
    FirstTokenDeadline,
    LogMetrics,
    PerPrompt,
    Priority,
    ReturnEffective,
    TokenIds,
)
from tureen.media.loader import MAX_REFERENCES
from tureen.requests import media_fields, planning, prompts
from tureen.requests.drafts import REQUEST_SIZE, Draft, Options, Plan, plan_of, salt_of
from tureen.requests.embedding import states_for
from tureen.requests.media_fields import MediaReference, PromptMedia
from tureen.requests.model_field import adapter_of
from tureen.requests.offload import LARGE
from tureen.requests.planning import Names, Sampling, per_prompt
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.state import Context, ServerState
from tureen.requests.thinking_budget import ReasoningBudget
from tureen.sessions.sessions import Turn
from tureen.sessions.tree import SessionParams

MAX_HIDDEN_VALUES = 1 << 24
"""Most numbers of hidden states in one answer; as JSON they are some 300 MB."""

MAX_HIDDEN_SIZE = 1 << 16

_json = msgspec.json.Encoder()

PROMPT_FIELDS = ("text", "input_ids", "input_embeds")

TABLES = read_tables(Path(__file__).with_name("fields.toml"))

NO_MEDIA = PromptMedia((), (), "image", "image_data", "video_data")

HiddenStatesField = bool | Literal["last"]
References = Annotated[list[MediaReference], Meta(max_length=MAX_REFERENCES)]
LogprobIds = Annotated[
    list[int | Annotated[list[int], Meta(max_length=MAX_LOGPROB_IDS)] | None], Meta(max_length=MAX_PROMPTS)
]
"""At most MAX_LOGPROB_IDS ids, or a list of such lists."""
Numbers = Annotated[list[float], Meta(max_length=MAX_HIDDEN_SIZE)]
Embeddings = Annotated[
    list[Annotated[list[float | Numbers], Meta(max_length=MAX_TOKEN_IDS)]],
    Meta(max_length=MAX_TOKEN_IDS, extra={"batch": MAX_PROMPTS}),
]
"""The rows of one prompt, or a batch of such lists."""


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /generate`. A list gives one value per prompt of a batch."""

    text: Annotated[str | PerPrompt[str] | None, Meta(description="Prompt, or a batch of prompts.")] = None
    input_ids: Annotated[
        Annotated[list[int | TokenIds], Meta(max_length=MAX_TOKEN_IDS, extra={"batch": MAX_PROMPTS})] | None,
        Meta(description="Token ids in place of text; a list of lists is a batch."),
    ] = None
    input_embeds: Annotated[
        Embeddings | None,
        Meta(
            description="Embeddings [tokens, hidden size] in place of text, or a batch of them; never in the prefix "
            "cache."
        ),
    ] = None
    sampling_params: Annotated[
        JsonObject | PerPrompt[JsonObject], Meta(description="Sampling parameters; see the parameters page.")
    ] = msgspec.field(default_factory=dict)
    rid: Annotated[
        str | PerPrompt[str] | None,
        Meta(description="Request id, at most 256 printable ASCII characters; a batch of `r` gets r_0, r_1, …"),
    ] = None
    return_logprob: Annotated[bool | PerPrompt[bool], Meta(description="Return log-probabilities.")] = False
    logprob_start_len: Annotated[
        int | PerPrompt[int], Meta(description="First prompt position with log-probabilities; -1 = output only.")
    ] = -1
    top_logprobs_num: Annotated[int | PerPrompt[int], Meta(description="Best alternatives per position, 0 to 128.")] = 0
    token_ids_logprob: Annotated[
        LogprobIds | None, Meta(description="Log-probabilities of these ids at every position.")
    ] = None
    return_text_in_logprobs: Annotated[
        bool, Meta(description="Third element of a log-probability triple: the token's text.")
    ] = False
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="processed = after penalties, bias and temperature; raw = the model's own; both = processed, "
            "and the model's own as raw_output_…"
        ),
    ] = "processed"
    return_entropy: Annotated[
        bool, Meta(description="Return the entropy, in nats, of the distribution of each output token.")
    ] = False
    return_sampling_mask: Annotated[
        bool | PerPrompt[bool],
        Meta(description="Return which tokens could be sampled at each place; needs top_k of 1 to 4096, or greedy."),
    ] = False
    return_hidden_states: Annotated[
        HiddenStatesField | PerPrompt[HiddenStatesField],
        Meta(
            description="Return the last layer's output: a matrix for the prompt, then a vector per output token; "
            'or, with "last", the vector of the last position alone.'
        ),
    ] = False
    return_prompt_token_ids: Annotated[
        bool, Meta(description="Return the ids of the prompt's tokens, as prompt_token_ids next to the text.")
    ] = False
    return_effective: ReturnEffective = False
    explain: Explain = False
    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] = False
    image_data: Annotated[
        MediaReference | PerPrompt[MediaReference | References | None] | None,
        Meta(
            description="Pictures for the placeholders in the prompt: file name, URL, `data:` URL or base64, an object "
            "with it as `url`, or a list of these; see the media page."
        ),
    ] = None
    video_data: Annotated[
        MediaReference | PerPrompt[MediaReference | References | None] | None,
        Meta(description="Videos, given like pictures."),
    ] = None
    modalities: Annotated[
        PerPrompt[str] | None,
        Meta(description="Kind of image_data: image, multi-images, or video = frames. Default: by their number."),
    ] = None
    lora_path: Annotated[
        str | PerPrompt[str | None] | None,
        Meta(description="Name of a loaded adapter, or the path it was loaded from; see the adapters page."),
    ] = None
    model: Annotated[
        str | None, Meta(description="The served model, or an adapter; other names are reported, or refused.")
    ] = None
    session_params: Annotated[
        JsonObject | PerPrompt[JsonObject] | None,
        Meta(description="Continue a session: id, rid, offset, replace, drop_previous_output; see the sessions page."),
    ] = None
    custom_logit_processor: Annotated[
        str | PerPrompt[str | None] | None,
        Meta(description="A processor's name, or one sent as code; see the processors page."),
    ] = None
    require_reasoning: Annotated[
        bool,
        Meta(description="The output begins with reasoning; a constraint holds from its end. For models that think."),
    ] = False
    max_thinking_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=INT64_MAX)] | None,
        Meta(description="Most tokens of reasoning at the start of each output; the answer follows."),
    ] = None
    log_metrics: LogMetrics = True
    priority: Priority = 0
    cache_salt: Annotated[CacheKey | PerPrompt[CacheKey | None], Meta(description="Separates the prefix cache.")] = ""
    extra_key: Annotated[
        CacheKey | PerPrompt[CacheKey | None] | None,
        Meta(description="Separates the prefix cache, together with the salt."),
    ] = None
    deadline_ms: Deadline = None
    ttft_deadline_ms: FirstTokenDeadline = None


class ParsedBody(NamedTuple):
    """A body whose form is checked, and what it says of each of its prompts."""

    body: GenerateBody
    inputs: Texts | list[Prompt]  # texts are not tokenized yet
    is_batch: bool  # the prompts came as a list, even of one
    names: list[str]  # of each prompt, for errors
    samplings: list[Sampling]
    num_samples: int  # of each prompt
    fields: dict[str, list[Any]]  # the values of PER_PROMPT_FIELDS
    media: list[PromptMedia]
    sessions: list[SessionParams | None]


FIELDS = tuple(field.name for field in msgspec.structs.fields(GenerateBody))
MISPLACED = frozenset((*PARAM_FIELDS, *ALIASES)).difference(FIELDS, TABLES["body"].verdicts)
"""Fields of `sampling_params`, which clients of flat APIs send beside it."""
MISPLACED_PARAMS = frozenset(FIELDS).difference(PARAM_FIELDS, ALIASES, TABLES["sampling_params"].verdicts)
ENCODE_FIELDS = (
    "model", "text", "input_ids", "input_embeds", "rid", "log_metrics", "priority", "cache_salt", "extra_key",
    "deadline_ms",
)  # fmt: skip
"""The fields that `/encode` has of these."""
MAX_SHOWN = 48  # characters of a misplaced value

PER_PROMPT_FIELDS = (
    "lora_path", "session_params", "return_hidden_states", "custom_logit_processor", "cache_salt", "extra_key",
    "return_sampling_mask", "return_logprob",
)  # fmt: skip
"""Fields that hold a value for all prompts or a list of one each, besides those that other functions read."""


class GeneratePlan(msgspec.Struct, frozen=True):
    """A body's requests, and the form of its answer."""

    plan: Plan
    is_list: bool  # a batch, or n > 1
    stream: bool
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool = False
    shows_logprobs: tuple[bool, ...] = ()  # of each prompt
    budget: ReasoningBudget | None = None  # of reasoning
    num_samples: int = 1  # of each prompt
    turns: tuple[Turn | None, ...] = ()  # of each request; () when no request continues a session


def size_of(payload: dict[str, Any]) -> int:
    """Returns the cost of `parse` for `offload`: expensive are embeddings, checked row by row, and stop patterns.

    Raises InvalidRequest for too many stop patterns.
    """
    rows, params_sent = payload.get("input_embeds"), payload.get("sampling_params")
    if isinstance(rows, list) and len(rows) > 1:
        return LARGE
    params = params_sent[:MAX_PROMPTS] if isinstance(params_sent, list) else [params_sent]
    patterns = planning.PATTERN_SIZE * planning.patterns_len(params)
    return REQUEST_SIZE * len(params) + patterns + planning.words_len(params)


def parse(payload: dict[str, Any], context: Context) -> ParsedBody:
    """Checks a JSON body's form; texts are not tokenized yet. Raises InvalidRequest."""
    fields_sent = [name for name in PROMPT_FIELDS if payload.get(name) is not None]
    if len(fields_sent) != 1:
        got = "none of them" if not fields_sent else " and ".join(fields_sent)
        raise InvalidRequest(
            f"send exactly one of {', '.join(PROMPT_FIELDS)}; got {got}",
            field=fields_sent[-1] if fields_sent else "text",
        )
    _refuse_misplaced(payload, MISPLACED, "in sampling_params", '"sampling_params": {%s}')
    placed = {name: value for name, value in payload.items() if name not in MISPLACED}
    fields = offered(placed, FIELDS, TABLES["body"], inside=PARAM_FIELDS, at="sampling_params")
    body = convert(fields, GenerateBody)
    planning.check_priority(body.priority, context)
    inputs = _inputs(body, context)
    is_batch, [field] = _is_batch(body), fields_sent
    batch = len(inputs.texts) if isinstance(inputs, Texts) else len(inputs)
    samplings = samplings_of(body, batch, context)
    num_samples = planning.check_size(batch, samplings, field, context.config)
    fields = planning.fields_per_prompt(body, PER_PROMPT_FIELDS, batch)
    return ParsedBody(
        body=body,
        inputs=inputs,
        is_batch=is_batch,
        names=[f"{field}[{index}]" if is_batch else field for index in range(batch)],
        samplings=samplings,
        num_samples=num_samples,
        fields=fields,
        media=_media(body, batch, is_batch=is_batch),
        sessions=_sessions(fields["session_params"], is_list=isinstance(body.session_params, list)),
    )


def _inputs(body: GenerateBody, context: Context) -> Texts | list[Prompt]:
    """Returns the prompts, texts as they are. Raises InvalidRequest."""
    if body.text is not None:
        if isinstance(body.text, list):
            planning.check_batch(len(body.text), "text", context)
        return prompts.texts(body.text, "text")
    if body.input_ids is not None:
        return prompts.id_lists(body.input_ids, context, may_be_empty=body.session_params is not None)
    for field in ("image_data", "video_data"):
        if getattr(body, field) is not None:
            raise InvalidRequest(f"{field} needs a prompt of text or input_ids, not input_embeds", field=field)
    if body.session_params is not None:
        raise InvalidRequest(
            "input_embeds cannot continue a session, which holds tokens; send text or input_ids",
            field="input_embeds",
        )
    return prompts.embeddings(body.input_embeds or [], context)


def _is_batch(body: GenerateBody) -> bool:
    """Says whether the prompts came as a list, even of one."""
    if body.text is not None:
        return isinstance(body.text, list)
    if body.input_ids is not None:
        return bool(body.input_ids) and isinstance(body.input_ids[0], list)
    rows: Any = body.input_embeds
    return bool(rows) and bool(rows[0]) and isinstance(rows[0][0], list)


def _refuse_misplaced(fields: dict[str, Any], names: Collection[str], where: str, form: str) -> None:
    """Raises InvalidRequest for the first of `names` among `fields`: it belongs elsewhere, as `form` shows. A value
    that switches its option off is taken anywhere."""
    for name in fields:
        if name in names and fields[name] is not None and not is_off(name, fields[name]):
            value = _json.encode(fields[name]).decode()
            shown = form % f'"{name}": {value if len(value) <= MAX_SHOWN else "…"}'
            raise InvalidRequest(f"{name} belongs {where}: send {shown}", field=name, code="misplaced_field")


def samplings_of(body: GenerateBody, batch: int, context: Context) -> list[Sampling]:
    """Returns the sampling parameters of each of `batch` prompts. Raises InvalidRequest."""
    sampling_params = body.sampling_params
    if not isinstance(sampling_params, list):
        return [_sampling_of(sampling_params, "sampling_params", body, context)] * batch
    params: list[dict[str, Any]] = per_prompt(sampling_params, batch, "sampling_params")
    return [
        _sampling_of(prompt_params, f"sampling_params[{index}]", body, context)
        for index, prompt_params in enumerate(params)
    ]


def _sampling_of(params: dict[str, Any], where: str, body: GenerateBody, context: Context) -> Sampling:
    _refuse_misplaced(params, MISPLACED_PARAMS, f"beside {where.split('[')[0]}, not in it", "{%s, …}")
    placed = {name: value for name, value in params.items() if name not in MISPLACED_PARAMS}
    fields = read_params(placed, where, TABLES["sampling_params"])
    if body.require_reasoning or body.max_thinking_tokens:
        fields = thinking.after_reasoning(fields, body, where, context)
    return planning.make_sampling(fields, context, Names(where))


def with_adapter(payload: dict[str, Any], state: ServerState) -> dict[str, Any]:
    """Returns a body with the adapter that its `model` names in lora_path. Raises NotFound, InvalidRequest."""
    model, path = payload["model"], payload.get("lora_path")
    adapter = adapter_of(model, state) if isinstance(model, str) else ""
    if adapter and path not in (None, adapter, state.adapters[adapter]):
        raise InvalidRequest("lora_path and model name different adapters; send one", field="lora_path")
    return payload | {"lora_path": adapter} if adapter and path is None else payload


def adapters_of(parsed: ParsedBody) -> list[tuple[str, str]]:
    """Returns the adapters that prompts name, each with its field for errors."""
    is_list = isinstance(parsed.body.lora_path, list)
    return [
        (name, f"lora_path[{index}]" if is_list else "lora_path")
        for index, name in enumerate(parsed.fields["lora_path"])
        if name is not None
    ]


def _media(body: GenerateBody, batch: int, *, is_batch: bool) -> list[PromptMedia]:
    """Returns the pictures and videos of each of `batch` prompts. Raises InvalidRequest."""
    if body.image_data is None and body.video_data is None and body.modalities is None:
        return [NO_MEDIA] * batch
    media = media_fields.read_media(body.image_data, body.video_data, body.modalities, batch, is_batch=is_batch)
    if body.session_params is not None and any(item.pictures or item.videos for item in media):
        raise InvalidRequest(
            "session_params cannot go with image_data or video_data: a session holds tokens; send the whole prompt",
            field="session_params",
        )
    return media


def limits_of(body: GenerateBody, waited_s: float = 0.0) -> dict[str, int | None]:
    """Returns the body's deadlines in milliseconds, by field, less the seconds waited since it arrived."""
    sent = {"deadline_ms": body.deadline_ms, "ttft_deadline_ms": body.ttft_deadline_ms}
    return {name: None if limit is None else max(1, limit - round(waited_s * 1000)) for name, limit in sent.items()}


def _sessions(sent: list[dict[str, Any] | None], *, is_list: bool) -> list[SessionParams | None]:
    """Returns the session that each prompt continues, None = none. Raises InvalidRequest.

    `sent`: session_params of each prompt; `is_list`: the body has a list of them.
    """
    sessions: list[SessionParams | None] = []
    for index, params in enumerate(sent):
        sessions.append(None)
        if params is None:
            continue
        where = f"session_params[{index}]" if is_list else "session_params"
        refuse_unknown(params, SessionParams.__struct_fields__, where)
        fields = {name: value for name, value in params.items() if value is not None}
        sessions[index] = convert(fields, SessionParams, Names(where).path)
    _check_replacing([session for session in sessions if session is not None])
    return sessions


def _check_replacing(params: Sequence[SessionParams]) -> None:
    """Raises InvalidRequest when requests of one body would replace each other."""
    counts = Counter(session.id for session in params)
    for session in params:
        if session.replace and counts[session.id] > 1:
            raise InvalidRequest(
                f"session_params has replace: true, and {counts[session.id]} prompts of the batch are of session "
                f"{echo(session.id)}; send them one after the other",
                field="session_params.replace",
            )


def plan(
    parsed: ParsedBody, resolved: Sequence[Prompt], state: ServerState, *, owner: str, arrived_s: float
) -> GeneratePlan:
    """Makes the requests of a body whose prompts are tokenized. Raises InvalidRequest.

    `owner`: the client, whose name separates its prefix cache from others'; `arrived_s`: when the body arrived, by the
    monotonic clock.
    """
    body, context = parsed.body, state.context
    draft = Draft(
        prompts=resolved,
        names=parsed.names,
        samplings=parsed.samplings,
        options=_options(parsed, resolved, context, limits_of(body, time.monotonic() - arrived_s)),
        owner=owner,
        rid=body.rid,
        is_batch=parsed.is_batch,
        log_metrics=body.log_metrics,
        arrived_s=arrived_s,
    )
    request_plan = plan_of(draft, state)
    _check_hidden(request_plan.requests, context.info.hidden_size)
    budget = None
    if body.max_thinking_tokens and context.reasoning_format is not None:
        request_plan = thinking.thinking(request_plan, context)
        budget = ReasoningBudget(body.max_thinking_tokens, thinking.BUDGET)
    return GeneratePlan(
        plan=request_plan,
        budget=budget,
        is_list=parsed.is_batch or parsed.num_samples > 1,
        stream=body.stream,
        return_text_in_logprobs=body.return_text_in_logprobs,
        return_prompt_token_ids=body.return_prompt_token_ids,
        shows_logprobs=tuple(parsed.fields["return_logprob"]),
        num_samples=parsed.num_samples,
    )


def _options(
    parsed: ParsedBody, resolved: Sequence[Prompt], context: Context, limits: dict[str, int | None]
) -> list[Options]:
    """Returns the options of each prompt. Raises InvalidRequest. `limits`: the deadlines that are left."""
    body, fields = parsed.body, parsed.fields
    logprobs: list[LogprobSpec | None] = [None] * len(resolved)
    sent = {field: getattr(body, field) for field in LOGPROB_FIELDS}
    if body.return_logprob or sent != LOGPROB_FIELDS:
        token_ids = [prompt.token_ids for prompt in resolved]
        logprobs = logprob_specs(sent | {"return_logprob": body.return_logprob}, token_ids, context.info.vocab_size)
    if body.return_entropy or body.return_sampling_mask:
        starts = [len(prompt.token_ids) if body.return_entropy else -1 for prompt in resolved]
        logprobs = with_draws(logprobs, parsed.samplings, starts, fields["return_sampling_mask"])
    processors = _processors(body, fields["custom_logit_processor"], context)
    return [
        Options(
            adapter=fields["lora_path"][index] or "",
            logprobs=logprobs[index],
            hidden_states=_which_hidden(fields["return_hidden_states"][index], context.info),
            processor=processors[index],
            return_effective=body.return_effective,
            explain=body.explain,
            cache_salt=salt_of(fields["cache_salt"][index] or "", fields["extra_key"][index]),
            priority=body.priority,
            deadline_ms=limits["deadline_ms"],
            ttft_deadline_ms=limits["ttft_deadline_ms"],
        )
        for index in range(len(resolved))
    ]


def _processors(body: GenerateBody, sent: list[str | None], context: Context) -> list[str]:
    """Returns the logit processor of each prompt, which sent it as `sent` has it. Raises InvalidRequest."""
    where = "custom_logit_processor" + "[{}]" * isinstance(body.custom_logit_processor, list)
    check = [(value, where.format(index)) for index, value in enumerate(sent)]
    return ["" if value is None else check_processor(value, context.config, field) for value, field in check]


def _which_hidden(choice: HiddenStatesField, info: EngineInfo) -> HiddenStates:
    if choice != "last":
        return "all" if choice else "none"
    return states_for("last" if info.pooling is None else None, info)


def _check_hidden(requests: Sequence[GenerateRequest], hidden_size: int) -> None:
    asking = (request for request in requests if request.hidden_states == "all")
    num_values = hidden_size * sum(len(request.token_ids) + request.max_new_tokens for request in asking)
    if num_values > MAX_HIDDEN_VALUES:
        message = (
            f"return_hidden_states: true could return {num_values} numbers; at most {MAX_HIDDEN_VALUES} fit an answer: "
            'send fewer or shorter prompts, lower max_new_tokens, or ask for "last"'
        )
        raise InvalidRequest(message, field="return_hidden_states")
