"""SGLang's `/generate` body: from a JSON object to a plan of requests. No HTTP: the offline engine uses it too."""

from __future__ import annotations

import secrets
import uuid
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from tureen.api.body import convert, parse_params, refuse_not_yet, refuse_unknown
from tureen.api.state import Context
from tureen.errors import InvalidRequest, echo
from tureen.sampling.params import SamplingParams
from tureen.types import GenerateRequest, LogprobsMode, LogprobSpec

T = TypeVar("T")

MAX_PROMPTS = 128
MAX_SEQUENCES = 512
MAX_RID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_TOP_LOGPROBS = 128
MAX_LOGPROB_IDS = 1024

NOT_YET = (
    "input_embeds",
    "image_data",
    "video_data",
    "modalities",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
)
PROMPT_FIELDS = ("text", "input_ids", "input_embeds", "prompt", "inputs")

Milliseconds = Annotated[int, Meta(ge=1, le=2**53)]


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /generate`. A list gives one value per prompt of a batch."""

    text: Annotated[str | list[str] | None, Meta(description="Prompt, or a batch of prompts.")] = None
    input_ids: Annotated[
        list[int | list[int]] | None, Meta(description="Token ids in place of text; a list of lists is a batch.")
    ] = None
    sampling_params: Annotated[
        dict[str, Any] | list[dict[str, Any]], Meta(description="How to sample; see the parameters page.")
    ] = msgspec.field(default_factory=dict)
    rid: Annotated[
        str | list[str] | None,
        Meta(description="Request id, at most 256 printable ASCII characters; a batch of `r` gets r_0, r_1, …"),
    ] = None
    return_logprob: Annotated[bool | list[bool], Meta(description="Return log-probabilities.")] = False
    logprob_start_len: Annotated[
        int | list[int], Meta(description="First prompt position with log-probabilities; -1 = output only.")
    ] = -1
    top_logprobs_num: Annotated[int | list[int], Meta(description="Best alternatives per position, 0 to 128.")] = 0
    token_ids_logprob: Annotated[
        list[int | list[int] | None] | None, Meta(description="Log-probabilities of these ids at every position.")
    ] = None
    return_text_in_logprobs: Annotated[
        bool, Meta(description="Third element of a log-probability triple: the token's text.")
    ] = False
    logprobs_mode: Annotated[
        LogprobsMode, Meta(description="processed = after penalties, bias and temperature; raw = the model's own.")
    ] = "processed"
    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] = False
    log_metrics: Annotated[bool, Meta(description="false: this request does not count in the metrics.")] = True
    priority: Annotated[
        int,
        Meta(ge=-(2**31), le=2**31 - 1, description="Higher runs first; needs --enable-priority-scheduling."),
    ] = 0
    cache_salt: Annotated[str, Meta(description="Separates the prefix cache.", max_length=MAX_SALT_CHARS)] = ""
    deadline_ms: Annotated[Milliseconds | None, Meta(description="Wall-clock limit from arrival to the end.")] = None
    ttft_deadline_ms: Annotated[
        Milliseconds | None, Meta(description="Wall-clock limit from arrival to the first token.")
    ] = None

    @property
    def is_batch(self) -> bool:
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    def prompt_name(self, index: int) -> str:
        """What to call a prompt in an error."""
        name = "text" if self.text is not None else "input_ids"
        return f"{name}[{index}]" if self.is_batch else name


FIELDS = tuple(field.name for field in msgspec.structs.fields(GenerateBody))


class Texts(NamedTuple):
    """Prompts that must be tokenized, and what to call each in an error."""

    texts: list[str]
    names: list[str]


class Plan(msgspec.Struct, frozen=True):
    """What a body asks for: sequences in the order of the answer, prompt-major."""

    requests: tuple[GenerateRequest, ...]
    rids: tuple[str, ...]  # meta_info.id of each
    names: dict[str, tuple[int, ...]]  # what a client may abort by -> indices into requests
    is_list: bool  # the answer is a list: a batch, or n > 1
    stream: bool
    return_text_in_logprobs: bool
    log_metrics: bool


def parse(given: dict[str, Any], context: Context) -> tuple[GenerateBody, Texts | list[list[int]]]:
    """Check the body's form. Returns it with its prompts. Raises InvalidRequest."""
    _check_one_prompt(given)
    refuse_unknown(given, (*FIELDS, *NOT_YET, "prompt", "inputs"))
    refuse_not_yet(given, NOT_YET)
    fields = {name: value for name, value in given.items() if value is not None and name in FIELDS}
    body = convert(fields, GenerateBody)
    if body.priority and not context.config.enable_priority_scheduling:
        raise InvalidRequest(
            f"priority is {body.priority}, but the server runs without --enable-priority-scheduling; leave it out",
            field="priority",
        )
    prompts = _prompts(body, context.info.vocab_size)
    num_prompts = len(prompts.texts if isinstance(prompts, Texts) else prompts)
    name = "text" if body.text is not None else "input_ids"
    if not num_prompts:
        raise InvalidRequest(
            f"{name} is an empty list; it must have at least one prompt", field=name, code="empty_prompt"
        )
    if num_prompts > MAX_PROMPTS:
        raise InvalidRequest(f"{name} is a batch of at most {MAX_PROMPTS} prompts, got {num_prompts}", field=name)
    return body, prompts


def _check_one_prompt(given: dict[str, Any]) -> None:
    found = [name for name in PROMPT_FIELDS if given.get(name) is not None]
    listed = "text, input_ids, input_embeds, prompt, inputs"
    if len(found) != 1:
        got = "none of them" if not found else " and ".join(found)
        raise InvalidRequest(f"send exactly one of {listed}; got {got}", field=found[-1] if found else "text")
    if found[0] in ("prompt", "inputs"):
        dialect = "MindIE and vLLM" if found[0] == "prompt" else "TGI"
        raise InvalidRequest(
            f"{found[0]} belongs to the dialect of {dialect}, which this version of tureen does not have; send text",
            field=found[0],
            code="not_available",
        )


def _prompts(body: GenerateBody, vocab_size: int) -> Texts | list[list[int]]:
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        names = [body.prompt_name(index) for index in range(len(texts))]
        for text, name in zip(texts, names, strict=True):
            if not text:
                raise InvalidRequest(
                    f"{name} is empty; a prompt has at least one token", field=name, code="empty_prompt"
                )
        return Texts(texts, names)
    given = body.input_ids or []
    batch = given if body.is_batch else [given]
    for index, ids in enumerate(batch):
        if not isinstance(ids, list):
            raise InvalidRequest(
                "input_ids mixes token ids and lists of them; send one or the other", field="input_ids"
            )
        _check_ids(ids, body.prompt_name(index), vocab_size)
    return batch  # type: ignore[return-value]


def _check_ids(ids: list[Any], where: str, vocab_size: int) -> None:
    if not ids:
        raise InvalidRequest(f"{where} is empty; a prompt has at least one token", field=where, code="empty_prompt")
    for position, token_id in enumerate(ids):
        if not isinstance(token_id, int):
            raise InvalidRequest(
                "input_ids mixes token ids and lists of them; send one or the other", field="input_ids"
            )
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{where}[{position}] must be a token id in [0, {vocab_size}), got {echo(token_id)}",
                field=where,
                code="token_id_out_of_range",
            )


def plan(body: GenerateBody, prompt_ids: list[list[int]], context: Context) -> Plan:
    """Resolve everything that may be given per prompt or left out. Raises InvalidRequest."""
    batch = len(prompt_ids)
    given = _per_prompt(body.sampling_params, batch, "sampling_params")
    params = []
    for index, one in enumerate(given):
        where = f"sampling_params[{index}]" if isinstance(body.sampling_params, list) else "sampling_params"
        params.append(parse_params(one, vocab_size=context.info.vocab_size, where=where))
    num_samples = params[0].n
    if any(one.n != num_samples for one in params):
        raise InvalidRequest("sampling_params.n must be the same for all prompts of a batch", field="sampling_params.n")
    if batch * num_samples > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{batch} prompts with n = {num_samples} make {batch * num_samples} sequences; at most {MAX_SEQUENCES}",
            field="sampling_params.n",
        )
    logprobs = _logprob_specs(body, [len(ids) for ids in prompt_ids], context)
    rids = _rids(body.rid, batch, body.is_batch)
    requests: list[GenerateRequest] = []
    for index, ids in enumerate(prompt_ids):
        _check_fits(body.prompt_name(index), len(ids), params[index], context)
        max_new_tokens = _max_new_tokens(params[index], given[index], len(ids), context)
        seed = params[index].sampling_seed
        base = secrets.randbits(63) if seed is None else seed
        for sample in range(num_samples):
            requests.append(
                GenerateRequest(
                    id="",
                    token_ids=tuple(ids),
                    params=params[index],
                    max_new_tokens=max_new_tokens,
                    seed=(base + sample + 2**63) % 2**64 - 2**63,
                    logprobs=logprobs[index],
                    cache_salt=body.cache_salt,
                    priority=body.priority,
                    deadline_ms=body.deadline_ms,
                    ttft_deadline_ms=body.ttft_deadline_ms,
                )
            )
    names, all_rids = _names(body.rid, rids, num_samples)
    return Plan(
        requests=tuple(requests),
        rids=all_rids,
        names=names,
        is_list=body.is_batch or num_samples > 1,
        stream=body.stream,
        return_text_in_logprobs=body.return_text_in_logprobs,
        log_metrics=body.log_metrics,
    )


def _per_prompt(value: T | list[T], batch: int, name: str) -> list[T]:
    if not isinstance(value, list):
        return [value] * batch
    if len(value) != batch:
        raise InvalidRequest(f"{name} has {len(value)} entries, but the batch has {batch} prompts", field=name)
    return value


def _rids(rid: str | list[str] | None, batch: int, is_batch: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(batch)]
    if isinstance(rid, str):
        rids = [f"{rid}_{index}" for index in range(batch)] if is_batch else [rid]
    elif is_batch:
        rids = _per_prompt(rid, batch, "rid")
    else:
        raise InvalidRequest("rid is a list, but there is one prompt, not a batch; send a string", field="rid")
    for one in [rid] if isinstance(rid, str) else rids:
        if not (1 <= len(one) <= MAX_RID_CHARS and one.isascii() and one.isprintable()):
            raise InvalidRequest(
                f"rid must be 1 to {MAX_RID_CHARS} printable ASCII characters, got {echo(one)}", field="rid"
            )
    if len(set(rids)) < len(rids):
        raise InvalidRequest("rid has the same id twice; each prompt of a batch needs its own", field="rid")
    return rids


def _names(
    rid: str | list[str] | None, rids: list[str], num_samples: int
) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Every name a client may abort by, with the sequences it means; and each sequence's own."""
    names: dict[str, tuple[int, ...]] = {}
    own: list[str] = []
    for index, one in enumerate(rids):
        indices = tuple(range(index * num_samples, (index + 1) * num_samples))
        names[one] = indices
        if num_samples > 1:
            names.update({f"{one}_{sample}": (indices[sample],) for sample in range(num_samples)})
        own += [f"{one}_{sample}" if num_samples > 1 else one for sample in range(num_samples)]
    if isinstance(rid, str):
        names[rid] = tuple(range(len(own)))
    elif num_samples > 1 and len(names) < len(rids) + len(own):
        raise InvalidRequest("rid has an id that is also that of another's sample, such as x and x_0", field="rid")
    return names, tuple(own)


def _check_fits(name: str, num_prompt: int, params: SamplingParams, context: Context) -> None:
    if context.capacity - num_prompt < (0 if params.max_new_tokens == 0 else 1):
        raise InvalidRequest(
            f"The input ({num_prompt} tokens) is longer than the model's context length ({context.capacity} tokens); "
            "shorten it, or start the server with a larger --context-length or --max-total-tokens.",
            field=name,
            code="prompt_too_long",
        )


def _max_new_tokens(params: SamplingParams, given: dict[str, Any], num_prompt: int, context: Context) -> int:
    room = context.capacity - num_prompt
    asked = params.max_new_tokens
    if asked is not None and "max_new_tokens" in given and asked > room:
        raise InvalidRequest(
            f"sampling_params.max_new_tokens: the prompt's {num_prompt} tokens and max_new_tokens {asked} make "
            f"{num_prompt + asked}, more than the context length of {context.capacity}; lower it to at most {room}, "
            "or send null for up to the context end",
            field="sampling_params.max_new_tokens",
            code="context_exceeded",
        )
    resolved = room if asked is None else min(asked, room)
    if params.min_new_tokens > resolved:
        raise InvalidRequest(
            f"sampling_params.min_new_tokens is {params.min_new_tokens}, but only {resolved} tokens fit the context",
            field="sampling_params.min_new_tokens",
        )
    return resolved


def _logprob_specs(body: GenerateBody, prompt_lens: list[int], context: Context) -> list[LogprobSpec | None]:
    batch = len(prompt_lens)
    wanted = _per_prompt(body.return_logprob, batch, "return_logprob")
    starts = _per_prompt(body.logprob_start_len, batch, "logprob_start_len")
    tops = _per_prompt(body.top_logprobs_num, batch, "top_logprobs_num")
    ids = _logprob_ids(body.token_ids_logprob, batch, context.info.vocab_size)
    specs: list[LogprobSpec | None] = []
    for index, num_prompt in enumerate(prompt_lens):
        if not -1 <= starts[index] <= num_prompt:
            raise InvalidRequest(
                f"logprob_start_len must be -1 or a position in the prompt of {num_prompt} tokens, got {starts[index]}",
                field="logprob_start_len",
            )
        if not 0 <= tops[index] <= min(MAX_TOP_LOGPROBS, context.info.vocab_size):
            raise InvalidRequest(
                f"top_logprobs_num must be 0 to {MAX_TOP_LOGPROBS}, got {echo(tops[index])}", field="top_logprobs_num"
            )
        if not wanted[index]:
            _refuse_unused_logprob_fields(starts[index], tops[index], ids[index])
        spec = LogprobSpec(starts[index], tops[index], ids[index], body.logprobs_mode)
        specs.append(spec if wanted[index] else None)
    return specs


def _refuse_unused_logprob_fields(start: int, top: int, ids: tuple[int, ...]) -> None:
    """A field that would do nothing is refused, but for the values that clients send as defaults."""
    for name, is_set in (("top_logprobs_num", top > 0), ("token_ids_logprob", bool(ids))):
        if is_set:
            raise InvalidRequest(f"{name} needs return_logprob: true", field=name)
    if start > 0:
        raise InvalidRequest("logprob_start_len needs return_logprob: true", field="logprob_start_len")


def _logprob_ids(given: list[int | list[int] | None] | None, batch: int, vocab_size: int) -> list[tuple[int, ...]]:
    lists: list[list[Any]]
    if not given:
        return [()] * batch
    if all(isinstance(one, int) for one in given):
        lists = [given] * batch
    elif any(isinstance(one, int) for one in given):
        raise InvalidRequest("token_ids_logprob mixes token ids and lists of them; send one", field="token_ids_logprob")
    else:
        nested: list[Any] = [one or [] for one in given]
        lists = _per_prompt(nested, batch, "token_ids_logprob")
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
    return [tuple(ids) for ids in lists]
