"""SGLang's `/generate` body: from a JSON object to requests. No HTTP: the offline engine uses it too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from tureen.contract.params import JsonObject
from tureen.contract.types import NO_TOKEN, EngineInfo, GenerateRequest, HiddenStates, LogprobsMode, LogprobSpec
from tureen.errors import InvalidRequest, echo
from tureen.media.loader import MAX_REFERENCES
from tureen.requests import media_fields, planning, prompts
from tureen.requests.body import convert, read_params, refuse_not_offered, refuse_unknown
from tureen.requests.drafts import REQUEST_SIZE, Draft, Options, Plan, effective, plan_of
from tureen.requests.embedding import states_for
from tureen.requests.media_fields import PromptMedia
from tureen.requests.offload import LARGE
from tureen.requests.planning import Names, Sampling, per_prompt
from tureen.requests.processor_field import check_processor
from tureen.requests.prompts import Prompt, Texts, check_batch
from tureen.requests.sessions import SessionParams, Turn
from tureen.requests.shared_fields import (
    MAX_LOGPROB_IDS,
    MAX_PROMPTS,
    MAX_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    CacheSalt,
    Deadline,
    FirstTokenDeadline,
    LogMetrics,
    LogprobsModeField,
    PerPrompt,
    Priority,
    TokenIds,
)
from tureen.requests.state import Context, ServerState
from tureen.requests.verdicts import read_tables

MAX_HIDDEN_VALUES = 1 << 24
"""Numbers of hidden states that one answer may hold; as JSON they are some 300 MB."""

MAX_HIDDEN_SIZE = 1 << 16

PROMPT_FIELDS = ("text", "input_ids", "input_embeds")

TABLES = read_tables(Path(__file__).with_name("fields.toml"))
NOT_OFFERED, PARAMS_NOT_OFFERED = TABLES["body"].refused, TABLES["sampling_params"].refused

WantedHidden = bool | Literal["last"]
References = Annotated[list[str], Meta(max_length=MAX_REFERENCES)]
LogprobIds = Annotated[
    list[int | Annotated[list[int], Meta(max_length=MAX_LOGPROB_IDS)] | None],
    Meta(max_length=MAX_LOGPROB_IDS, extra={"batch": MAX_PROMPTS}),
]
Numbers = Annotated[list[float], Meta(max_length=MAX_HIDDEN_SIZE)]
Embeddings = Annotated[
    list[Annotated[list[float | Numbers], Meta(max_length=MAX_TOKEN_IDS)]],
    Meta(max_length=MAX_TOKEN_IDS, extra={"batch": MAX_PROMPTS}),
]
"""Rows of one prompt, or a batch of such lists."""


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
        JsonObject | PerPrompt[JsonObject], Meta(description="How to sample; see the parameters page.")
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
    logprobs_mode: LogprobsModeField = "processed"
    return_hidden_states: Annotated[
        WantedHidden | PerPrompt[WantedHidden],
        Meta(
            description="Return the last layer's output: a matrix for the prompt, then a vector per output token; "
            'or, with "last", the vector of the last position alone.'
        ),
    ] = False
    return_effective: Annotated[
        bool, Meta(description="Return every sampling parameter as it acted, and where its value came from.")
    ] = False
    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] = False
    image_data: Annotated[
        str | PerPrompt[str | References | None] | None,
        Meta(
            description="Pictures for the placeholders in the prompt: file name, URL, `data:` URL or base64, or a list "
            "of these; see the media page."
        ),
    ] = None
    video_data: Annotated[
        str | PerPrompt[str | References | None] | None, Meta(description="Videos, given like pictures.")
    ] = None
    modalities: Annotated[
        PerPrompt[str] | None,
        Meta(description="What image_data holds: image, multi-images, or video = frames. Default: from their number."),
    ] = None
    lora_path: Annotated[
        str | PerPrompt[str | None] | None,
        Meta(description="Name of a loaded adapter, or the path it was loaded from; see the adapters page."),
    ] = None
    session_params: Annotated[
        JsonObject | PerPrompt[JsonObject] | None,
        Meta(description="Continue a session: id, rid, offset, replace, drop_previous_output; see the sessions page."),
    ] = None
    custom_logit_processor: Annotated[
        str | PerPrompt[str | None] | None,
        Meta(description="A processor's name, or one sent as code; see the processors page."),
    ] = None
    log_metrics: LogMetrics = True
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    deadline_ms: Deadline = None
    ttft_deadline_ms: FirstTokenDeadline = None

    @property
    def prompt_field(self) -> str:
        return next(name for name in PROMPT_FIELDS if getattr(self, name) is not None)

    @property
    def is_batch(self) -> bool:
        match self.prompt_field:
            case "text":
                return isinstance(self.text, list)
            case "input_ids":
                return bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]
            case _:
                rows: Any = self.input_embeds
                return bool(rows) and bool(rows[0]) and isinstance(rows[0][0], list)

    def prompt_name(self, index: int) -> str:
        """What to call a prompt in an error."""
        return f"{self.prompt_field}[{index}]" if self.is_batch else self.prompt_field


FIELDS = tuple(field.name for field in msgspec.structs.fields(GenerateBody))


class GeneratePlan(msgspec.Struct, frozen=True):
    """A body's requests, and how its answer looks."""

    plan: Plan
    is_list: bool  # a batch, or n > 1
    stream: bool
    return_text_in_logprobs: bool
    turns: tuple[Turn | None, ...] = ()  # of each request, where sessions are continued
    effective: tuple[dict[str, dict[str, Any]], ...] = ()  # of each request, where they were asked for


def size_of(given: dict[str, Any]) -> int:
    """What checking its form costs: rows of embeddings are looked at one by one, everything else as a whole."""
    rows = given.get("input_embeds")
    return LARGE if isinstance(rows, list) and len(rows) > 1 else 0


def sampling_size(body: GenerateBody) -> int:
    """What `samplings_of` costs. Raises InvalidRequest where prompts have more patterns than fit."""
    given = body.sampling_params
    params = given if isinstance(given, list) else [given]
    return REQUEST_SIZE * len(params) + planning.PATTERN_SIZE * planning.patterns_len(params)


def parse(given: dict[str, Any], context: Context) -> tuple[GenerateBody, Texts | list[Prompt]]:
    """Check the body's form. Returns it with its prompts, texts not tokenized yet. Raises InvalidRequest."""
    found = [name for name in PROMPT_FIELDS if given.get(name) is not None]
    if len(found) != 1:
        got = "none of them" if not found else " and ".join(found)
        raise InvalidRequest(
            f"send exactly one of {', '.join(PROMPT_FIELDS)}; got {got}", field=found[-1] if found else "text"
        )
    refuse_unknown(given, (*FIELDS, *NOT_OFFERED))
    refuse_not_offered(given, NOT_OFFERED)
    body = convert({name: value for name, value in given.items() if value is not None and name in FIELDS}, GenerateBody)
    planning.check_priority(body.priority, context)
    if body.text is not None:
        return body, prompts.texts(body.text, "text")
    if body.input_ids is not None:
        may_be_empty = body.session_params is not None
        return body, prompts.id_lists(body.input_ids, context, may_be_empty=may_be_empty)
    for field in ("image_data", "video_data"):
        if getattr(body, field) is not None:
            raise InvalidRequest(f"{field} needs a prompt of text or input_ids, not input_embeds", field=field)
    if body.session_params is not None:
        raise InvalidRequest(
            "input_embeds cannot continue a session, which is made of tokens; send text or input_ids",
            field="input_embeds",
        )
    return body, prompts.embeddings(body.input_embeds or [], context)


def samplings_of(body: GenerateBody, batch: int, context: Context) -> list[Sampling]:
    """The sampling parameters of each prompt. Raises InvalidRequest."""
    given = body.sampling_params
    if not isinstance(given, list):
        return [_sampling_of(given, "sampling_params", context)] * batch
    params: list[dict[str, Any]] = per_prompt(given, batch, "sampling_params")
    return [_sampling_of(one, f"sampling_params[{index}]", context) for index, one in enumerate(params)]


def _sampling_of(given: dict[str, Any], where: str, context: Context) -> Sampling:
    refuse_not_offered(given, PARAMS_NOT_OFFERED, where)
    offered = {name: value for name, value in given.items() if name not in PARAMS_NOT_OFFERED}
    return planning.make_sampling(read_params(offered, where), context, Names(where))


def adapters_of(body: GenerateBody, batch: int) -> list[tuple[str, str]]:
    """The adapters that prompts ask for, each with what to call it in an error. Raises InvalidRequest."""
    given: Any = body.lora_path
    asked: list[str | None] = per_prompt(given, batch, "lora_path")
    is_list = isinstance(given, list)
    return [
        (name, f"lora_path[{index}]" if is_list else "lora_path")
        for index, name in enumerate(asked)
        if name is not None
    ]


def wanted_media(body: GenerateBody, batch: int) -> list[PromptMedia]:
    """The pictures and videos that each prompt asks for. Raises InvalidRequest."""
    wanted = media_fields.read_media(body.image_data, body.video_data, body.modalities, batch, is_batch=body.is_batch)
    if body.session_params is not None and any(one.pictures or one.videos for one in wanted):
        raise InvalidRequest(
            "session_params cannot go with image_data or video_data: a session is made of tokens; send the whole "
            "prompt",
            field="session_params",
        )
    return wanted


def limits_of(body: GenerateBody) -> dict[str, int | None]:
    """Its deadlines by their names."""
    return {"deadline_ms": body.deadline_ms, "ttft_deadline_ms": body.ttft_deadline_ms}


def after(waited_s: float, body: GenerateBody) -> GenerateBody:
    """The same with what is left of its deadlines: they count from the body's arrival."""
    limits = limits_of(body).items()
    left = {name: max(1, value - round(waited_s * 1000)) for name, value in limits if value is not None}
    return msgspec.structs.replace(body, **left) if left else body


def session_params_of(body: GenerateBody, batch: int) -> list[SessionParams | None]:
    """Which session each prompt continues. Raises InvalidRequest."""
    given = body.session_params
    if given is None:
        return [None] * batch
    found: list[SessionParams | None] = []
    for index, one in enumerate(per_prompt(given, batch, "session_params")):
        where = f"session_params[{index}]" if isinstance(given, list) else "session_params"
        refuse_unknown(one, SessionParams.__struct_fields__, where)
        fields = {name: value for name, value in one.items() if value is not None}
        found.append(convert(fields, SessionParams, Names(where).path))
    _check_replacing([one for one in found if one is not None])
    return found


def _check_replacing(params: Sequence[SessionParams]) -> None:
    """Raises InvalidRequest when requests of one body would replace each other."""
    counts = Counter(one.id for one in params)
    for one in params:
        if one.replace and counts[one.id] > 1:
            raise InvalidRequest(
                f"session_params has replace: true, and {counts[one.id]} prompts of the batch are of session "
                f"{echo(one.id)}; send them one after the other",
                field="session_params.replace",
            )


def plan(
    body: GenerateBody,
    found: Sequence[Prompt],
    samplings: Sequence[Sampling],
    state: ServerState,
    *,
    owner: str,
    arrived_s: float,
) -> GeneratePlan:
    """Resolve everything that may be given per prompt or left out. Raises InvalidRequest.

    `owner` is who asks; clients with names do not share the prefix cache.
    """
    context = state.context
    num_samples = planning.check_size(len(found), samplings, body.prompt_field)
    draft = Draft(
        prompts=found,
        names=[body.prompt_name(index) for index in range(len(found))],
        samplings=samplings,
        options=_options(body, found, context),
        owner=owner,
        rid=body.rid,
        is_batch=body.is_batch,
        log_metrics=body.log_metrics,
        arrived_s=arrived_s,
    )
    made = plan_of(draft, state)
    _check_hidden(made.requests, context.info.hidden_size)
    shown = made.requests if body.return_effective else ()
    return GeneratePlan(
        plan=made,
        is_list=body.is_batch or num_samples > 1,
        stream=body.stream,
        return_text_in_logprobs=body.return_text_in_logprobs,
        effective=tuple(
            effective(request, samplings[index // num_samples], context) for index, request in enumerate(shown)
        ),
    )


def _options(body: GenerateBody, found: Sequence[Prompt], context: Context) -> list[Options]:
    """The options of each prompt. Raises InvalidRequest."""
    batch = len(found)
    vocab_size = context.info.vocab_size
    wanted = per_prompt(body.return_logprob, batch, "return_logprob")
    starts = _logprob_starts(body.logprob_start_len, [prompt.token_ids for prompt in found])
    tops = _logprob_tops(body.top_logprobs_num, batch, vocab_size)
    ids = _logprob_ids(body.token_ids_logprob, batch, vocab_size)
    hidden: list[WantedHidden] = per_prompt(body.return_hidden_states, batch, "return_hidden_states")
    processors = _processors(body, batch, context)
    adapters: list[str | None] = per_prompt(cast(Any, body.lora_path), batch, "lora_path")
    return [
        Options(
            adapter=adapters[index] or "",
            logprobs=_logprob_spec(wanted[index], starts[index], tops[index], ids[index], body.logprobs_mode),
            hidden_states=_which_hidden(hidden[index], context.info),
            processor=processors[index],
            cache_salt=body.cache_salt,
            priority=body.priority,
            deadline_ms=body.deadline_ms,
            ttft_deadline_ms=body.ttft_deadline_ms,
        )
        for index in range(batch)
    ]


def _processors(body: GenerateBody, batch: int, context: Context) -> list[str]:
    given: Any = body.custom_logit_processor
    values: list[str | None] = per_prompt(given, batch, "custom_logit_processor")
    found = []
    for index, value in enumerate(values):
        field = f"custom_logit_processor[{index}]" if isinstance(given, list) else "custom_logit_processor"
        found.append("" if value is None else check_processor(value, context.config, field))
    return found


def _which_hidden(wanted: WantedHidden, info: EngineInfo) -> HiddenStates:
    if wanted == "last":
        return states_for(None, info)
    return "all" if wanted else "none"


def _check_hidden(requests: Sequence[GenerateRequest], hidden_size: int) -> None:
    num_values = hidden_size * sum(
        len(request.token_ids) + request.max_new_tokens for request in requests if request.hidden_states == "all"
    )
    if num_values > MAX_HIDDEN_VALUES:
        raise InvalidRequest(
            f"return_hidden_states: true could return {num_values} numbers; at most {MAX_HIDDEN_VALUES} fit an answer: "
            'send fewer or shorter prompts, lower max_new_tokens, or ask for "last"',
            field="return_hidden_states",
        )


def _logprob_starts(given: int | list[int], prompts: Sequence[Sequence[int]]) -> list[int]:
    """logprob_start_len of each prompt. Raises InvalidRequest for a position outside of it."""
    starts = per_prompt(given, len(prompts), "logprob_start_len")
    for start, token_ids in zip(starts, prompts, strict=True):
        if not -1 <= start <= len(token_ids):
            raise InvalidRequest(
                f"logprob_start_len must be -1 or a position in the prompt of {len(token_ids)} tokens, got "
                f"{echo(start)}",
                field="logprob_start_len",
            )
        if 0 <= start < len(token_ids) and min(token_ids[start:]) <= NO_TOKEN:
            raise InvalidRequest(
                "logprob_start_len needs text or token ids from there on: there are no tokens in input_embeds and in "
                "pictures to take log-probabilities of; leave it out",
                field="logprob_start_len",
            )
    return starts


def _logprob_tops(given: int | list[int], batch: int, vocab_size: int) -> list[int]:
    """top_logprobs_num of each prompt. Raises InvalidRequest."""
    tops = per_prompt(given, batch, "top_logprobs_num")
    for top in tops:
        if not 0 <= top <= min(MAX_TOP_LOGPROBS, vocab_size):
            raise InvalidRequest(
                f"top_logprobs_num must be 0 to {MAX_TOP_LOGPROBS}, got {echo(top)}", field="top_logprobs_num"
            )
    return tops


def _logprob_ids(given: list[int | list[int] | None] | None, batch: int, vocab_size: int) -> list[tuple[int, ...]]:
    """token_ids_logprob of each prompt. Raises InvalidRequest."""
    lists: list[list[Any]]
    if not given:
        return [()] * batch
    kinds = set(map(type, given))
    if kinds == {int}:
        lists = [given]
    elif int in kinds:
        raise InvalidRequest("token_ids_logprob mixes token ids and lists of them; send one", field="token_ids_logprob")
    else:
        check_batch(len(given), MAX_PROMPTS, "token_ids_logprob")
        nested: list[Any] = per_prompt(list(given), batch, "token_ids_logprob")
        lists = [one or [] for one in nested]
    for ids in lists:
        if len(ids) > MAX_LOGPROB_IDS:
            raise InvalidRequest(
                f"token_ids_logprob takes at most {MAX_LOGPROB_IDS} ids, got {len(ids)}", field="token_ids_logprob"
            )
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"token_ids_logprob contains out-of-vocabulary token id {echo(token_id)}; valid range is "
                    f"[0, {vocab_size})",
                    field="token_ids_logprob",
                    code="token_id_out_of_range",
                )
    found = [tuple(ids) for ids in lists]
    return found if len(found) == batch else found * batch


def _logprob_spec(
    wanted: bool, start: int, top: int, token_ids: tuple[int, ...], mode: LogprobsMode
) -> LogprobSpec | None:
    """Raises InvalidRequest where a field would do nothing, but for the values that clients send as defaults."""
    if wanted:
        return LogprobSpec(start, top, token_ids, mode)
    fields = {
        "top_logprobs_num": top > 0,
        "token_ids_logprob": bool(token_ids),
        "logprob_start_len": start > 0,
        "logprobs_mode": mode != "processed",
    }
    for name, is_set in fields.items():
        if is_set:
            raise InvalidRequest(f"{name} needs return_logprob: true", field=name)
    return None
