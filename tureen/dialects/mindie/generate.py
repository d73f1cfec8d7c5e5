"""Serves `/generate` as MindIE and vLLM's demo server do: flat parameters, answers that are lists of texts, and streams
whose pieces a NUL byte ends.

Source: MindIE's service API, "vLLM-compatible inference"; vllm/entrypoints/api_server.py.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.config import MAX_N
from tureen.contract.params import (
    EMPTY_IS_UNSET,
    INT64_MAX,
    MAX_BAD_WORDS,
    AllowedTokenIds,
    LogitBias,
    RepetitionDetection,
    Stops,
    StopTokenIds,
)
from tureen.contract.types import LogprobSpec
from tureen.errors import ContextExceeded, InvalidRequest, RequestFailed, TureenError, echo
from tureen.fields.body import convert, offered
from tureen.fields.constraints import (
    GUIDED,
    GuidedBackend,
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    GuidedSpace,
    GuidedTag,
    StructuredOutputs,
    add_constraints,
    structured_constraints,
)
from tureen.fields.rules import read_tables
from tureen.fields.shared import CacheSalt, Explain, Priority
from tureen.http.dialect import client_name, prepared, streamed, unless_gone
from tureen.http.errors import error_answer
from tureen.requests import planning
from tureen.requests.drafts import Options, Plan, one_prompt, plan_of
from tureen.requests.explanations import Explained, joined_explanations
from tureen.requests.generation import Output, Run, Sent, joined_notes
from tureen.requests.model_field import adapter_of
from tureen.requests.planning import Names
from tureen.requests.prompts import Prompt
from tureen.requests.state import Context, ServerState
from tureen.requests.tokenising import tokenize
from tureen.text.detokenizer import Detokenizer

MAX_PROMPT_CHARS = 512 << 10
DEFAULT_MAX_TOKENS = 16
MAX_TOP_K = 2**31 - 1
NUL = b"\0"
STATUS_OF_INVALID = 422
ERROR_TYPES = {
    404: "Input Validation Error",
    422: "Input Validation Error",
    429: "Service Unavailable",
    503: "Service Unavailable",
}
RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
PARAMETERS = {name: parameter for parameter, name in RENAMED.items()} | GUIDED
"""This dialect's names of sampling parameters -> those of SamplingParams; RENAMED is the other way round."""

TABLE = read_tables(Path(__file__).with_name("fields.toml"))["body"]

_json = msgspec.json.Encoder()


class MindieBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /generate` with `prompt`."""

    prompt: Annotated[str, Meta(description="The prompt: 1 to 524,288 characters.", min_length=1)]
    max_tokens: Annotated[
        int, Meta(ge=1, description="Most tokens to generate, at most --max-iter-times and what the context holds.")
    ] = DEFAULT_MAX_TOKENS
    repetition_penalty: Annotated[
        float, Meta(gt=0, le=2, description="Tokens of prompt and output: above 1 less likely, below 1 more.")
    ] = 1.0
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Subtracted from the logit of a token that is in the output.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Subtracted once for each time a token is in the output.")
    ] = 0.0
    temperature: Annotated[float, Meta(ge=0, description="0 = greedy; higher = more varied.")] = 1.0
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] | None,
        Meta(description="Keep the k most probable tokens; -1 or left out = all. 0 is refused."),
    ] = None
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="Keep the smallest set of tokens whose probability reaches top_p.")
    ] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1, description="Keep tokens with p >= min_p * p_max.")] = 0.0
    typical_p: Annotated[
        float, Meta(gt=0, le=1, description="Keep the tokens whose surprise is nearest the expected one.")
    ] = 1.0
    stream: Annotated[bool, Meta(description="Answer piece by piece, a NUL byte after each.")] = False
    seed: Annotated[int | None, Meta(description="Same request, same seed, same tokens. Default: random.")] = None
    stop: Annotated[
        str | Stops | None,
        Meta(description="Strings that end the output: up to --max-stop-strings, of 1..1024 characters."),
    ] = None
    stop_token_ids: Annotated[StopTokenIds | None, Meta(description="Token ids that end the output. At most 1024.")] = (
        None
    )
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the stop string or stop token in the text.")] = (
        False
    )
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    spaces_between_special_tokens: Annotated[
        bool, Meta(description="false = no space between two adjacent special tokens.")
    ] = True
    ignore_eos: Annotated[bool, Meta(description="EOS does not end the output; stops still do.")] = False
    min_tokens: Annotated[int, Meta(ge=0, description="Fewest tokens to generate.")] = 0
    logit_bias: Annotated[
        LogitBias | None, Meta(description="Added to the logits of these token ids; each in [-100, 100].")
    ] = None
    bad_words: Annotated[
        Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None,
        Meta(description="Words that the output never contains, with or without a space before them."),
    ] = None
    allowed_token_ids: Annotated[AllowedTokenIds | None, Meta(description="Only these tokens are sampled.")] = None
    repetition_detection: Annotated[
        RepetitionDetection | None,
        Meta(description="The output ends where a pattern of max_pattern_size tokens or fewer occurs min_count times."),
    ] = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=INT64_MAX)] | None,
        Meta(description="Tokens per piece of a stream. Default: the server's --stream-interval."),
    ] = None
    model: Annotated[str | None, Meta(description='Name of an adapter; "None" or the served model\'s name = none.')] = (
        None
    )
    n: Annotated[int, Meta(ge=1, le=MAX_N, description="Texts in the answer, at most --max-n.")] = 1
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_N)] | None,
        Meta(description="Number of outputs to generate; all are returned, the most probable first. At least n."),
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="vLLM's constraints.")] = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    guided_structural_tag: GuidedTag = None
    guided_decoding_backend: GuidedBackend = None
    guided_whitespace_pattern: GuidedSpace = None
    explain: Explain = False
    priority: Priority = 0
    cache_salt: CacheSalt = ""


FIELDS = tuple(field.name for field in msgspec.structs.fields(MindieBody))
NOT_PARAMETERS = (
    "prompt", "stream", "model", "n", "best_of", "structured_outputs", "guided_decoding_backend",
    "guided_whitespace_pattern", "explain", "priority", "cache_salt",
)  # fmt: skip


def as_mindie(error: TureenError) -> Response:
    """Returns an error as an answer in this dialect's form."""
    response = error_answer(error, error_object(error), _status(error))
    response.headers.update(_headers())
    return response


def error_object(error: TureenError) -> dict[str, str]:
    """Returns an error in this dialect's JSON form."""
    return {"error": error.message, "error_type": ERROR_TYPES.get(_status(error), "Incomplete Generation")}


def _status(error: TureenError) -> int:
    return STATUS_OF_INVALID if error.status == 400 else error.status


def _headers() -> dict[str, str]:
    """Returns the header that every answer of this dialect has."""
    return {"RequestUUID": str(uuid.uuid4())}


async def respond(payload: dict[str, Any], request: Request, state: ServerState) -> ASGIApp:
    """Answers a body of this dialect; errors are answers in its form."""
    try:
        state.check_accepting()
        body = parse(payload, state.context)
        adapter = _adapter(body, state)
        work = _plan(body, payload, state, owner=client_name(request), adapter=adapter)
        run = Run(state, await prepared(request, work))
        if body.stream:
            headers = _headers() | {"content-type": "text/event-stream"}
            return await streamed(
                request, _pieces(run, body, state), lambda error: _json.encode(error_object(error)) + NUL, headers
            )
        outputs = await unless_gone(request, run.whole())
        for output in outputs:
            _check_complete(output)
    except TureenError as error:
        return as_mindie(error)
    prefix = body.prompt if state.context.config.vllm_profile else f"{body.prompt} "
    ranked = _ranked(outputs, body)
    answer = {"text": [prefix + output.text for output in ranked], **joined_notes(outputs)}
    answer |= joined_explanations(ranked, [Explained(state.context) for _ in ranked])
    return Response(_json.encode(answer), headers=_headers(), media_type="application/json")


def parse(payload: dict[str, Any], context: Context) -> MindieBody:
    """Checks a JSON body's form and the bounds that depend on the server. Raises InvalidRequest."""
    fields = offered(payload, FIELDS, TABLE)
    body = convert(fields, MindieBody)
    if len(body.prompt) > MAX_PROMPT_CHARS:
        raise InvalidRequest(
            f"prompt must have at most {MAX_PROMPT_CHARS} characters, got {len(body.prompt)}", field="prompt"
        )
    limit = context.config.max_iter_times or context.capacity
    if "max_tokens" in fields and body.max_tokens > limit:
        raise InvalidRequest(
            f"max_tokens must be at most {limit}"
            + (" (--max-iter-times)" if context.config.max_iter_times else ", the context length")
            + f", got {echo(body.max_tokens)}",
            field="max_tokens",
        )
    if body.top_k == 0:
        raise InvalidRequest(f"top_k must be -1 or in [1, {MAX_TOP_K}], got 0", field="top_k")
    if body.best_of is not None and body.best_of < body.n:
        raise InvalidRequest(f"best_of must be at least n ({body.n}), got {body.best_of}", field="best_of")
    return body


def _adapter(body: MindieBody, state: ServerState) -> str:
    """Returns the adapter that `model` names; "" = none. Raises NotFound."""
    if body.model in ("None", *state.adapters.values()):
        return "" if body.model == "None" else body.model
    return adapter_of(body.model, state)


def _sampling(body: MindieBody, payload: dict[str, Any]) -> tuple[dict[str, Any], Names]:
    """Returns the sampling parameters that the body sets, and its names for them. Raises InvalidRequest."""
    fields, renamed = {}, dict(RENAMED)
    for name, value in payload.items():
        target = PARAMETERS.get(name, name)
        if value is None or name not in FIELDS or name in NOT_PARAMETERS or (value == "" and target in EMPTY_IS_UNSET):
            continue
        fields[target], renamed[target] = getattr(body, name), name
    if body.best_of is not None:
        renamed["n"] = "best_of"
    if isinstance(body.stop, str):
        fields["stop"] = [body.stop]
    constraints = () if body.structured_outputs is None else structured_constraints(body.structured_outputs)
    add_constraints(constraints, fields, renamed, body.guided_whitespace_pattern)
    return fields, Names("", renamed)


async def _plan(body: MindieBody, payload: dict[str, Any], state: ServerState, *, owner: str, adapter: str) -> Plan:
    context = state.context
    planning.check_priority(body.priority, context)
    fields, names = _sampling(body, payload)
    count = body.best_of or body.n
    defaults = {"max_new_tokens": min(DEFAULT_MAX_TOKENS, context.config.max_iter_times or DEFAULT_MAX_TOKENS)}
    sampling = await planning.sampling_of(fields | {"n": count}, context, names, defaults, as_recommended=False)
    if (body.best_of or 1) > 1 and sampling.params.is_greedy:
        raise InvalidRequest("best_of needs a temperature above 0: greedy outputs are all equal", field="best_of")
    [ids] = await tokenize([body.prompt], ["prompt"], context)
    _check_prompt_length(len(ids), context)
    logprobs = LogprobSpec() if body.best_of is not None else None
    options = Options(
        adapter=adapter,
        logprobs=logprobs,
        explain=body.explain,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    return plan_of(one_prompt(Prompt(ids), "prompt", sampling, options, owner=owner), state)


def _check_prompt_length(num_tokens: int, context: Context) -> None:
    """Raises InvalidRequest for a prompt that leaves no room for --max-iter-times tokens, as MindIE does, even when the
    request asks for fewer."""
    reserved = context.config.max_iter_times
    if reserved is not None and reserved < context.capacity < num_tokens + reserved:
        raise ContextExceeded(
            f"prompt has {num_tokens} tokens; at most {context.capacity - reserved} are taken: the context length of "
            f"{context.capacity} less the {reserved} of --max-iter-times",
            field="prompt",
            num_tokens=num_tokens,
            capacity=context.capacity - reserved,
        )


def _check_complete(output: Output) -> None:
    """Raises RequestFailed for an output that was aborted: this dialect's answers have no finish reason to show it."""
    if output.finish is not None and output.finish.type == "abort":
        raise RequestFailed(
            f"the request was ended before its text was complete ({output.finish.reason})", code="aborted"
        )


def _ranked(outputs: Sequence[Output], body: MindieBody) -> list[Output]:
    """Returns the outputs in order; with best_of those with the highest cumulative log-probability first."""
    if body.best_of is None:
        return list(outputs)
    return sorted(outputs, key=lambda output: output.cumulative_logprob, reverse=True)


async def _pieces(run: Run, body: MindieBody, state: ServerState) -> AsyncGenerator[bytes, None]:
    """Yields a JSON object with all texts, and a NUL byte, for each token with text; at least one.

    Tokens that arrive together, because the machine or the client is slow, are pieces of their own all the same. With a
    stream interval they share one.
    """
    config = state.context.config
    is_whole = config.mindie_full_text or config.vllm_profile
    prefix = body.prompt if config.vllm_profile else ""
    is_first, explained = True, [Explained(state.context) for _ in run.outputs]
    ends = [TokenEnds(output, state.context) for output in run.outputs]
    async with contextlib.aclosing(run.events()) as events:
        async for event in events:
            _check_complete(event.output)
            has_new = _has_new(run.outputs)
            is_last = all(output.finish is not None for output in run.outputs)
            notes = joined_notes(run.outputs) if is_last else {}
            has_more = has_new or (is_last and (is_first or notes or body.explain))
            while has_more:
                texts = [
                    _piece(output, end.following(), prefix, is_whole=is_whole)
                    for output, end in zip(run.outputs, ends, strict=True)
                ]
                has_more, is_first = _has_new(run.outputs), False
                told = {} if has_more else {**notes, **joined_explanations(run.outputs, explained)}
                yield _json.encode({"text": texts, **told}) + NUL


def _has_new(outputs: Sequence[Output]) -> bool:
    return any(len(output.text) > output.sent.chars for output in outputs)


class TokenEnds:
    """Finds where the text of an output's next token ends, so that each piece of a stream holds one token."""

    def __init__(self, output: Output, context: Context) -> None:
        params = output.request.params
        self._output = output
        self._detokenizer: Detokenizer | None = None
        if (params.stream_interval or context.config.stream_interval) == 1:
            params = msgspec.structs.replace(params, stop=(), stop_regex=())
            self._detokenizer = Detokenizer(context.tokenizer, params)
        self._num_tokens = self._end = 0

    def following(self) -> int:
        """Returns the position in the text up to which the next piece goes."""
        output = self._output
        if self._detokenizer is not None:
            while self._num_tokens < len(output.token_ids) and self._end <= output.sent.chars:
                self._detokenizer.append(output.token_ids[self._num_tokens], stops_allowed=False)
                self._end += len(self._detokenizer.take())
                self._num_tokens += 1
            if self._end > output.sent.chars:
                return min(self._end, len(output.text))
        return len(output.text)


def _piece(output: Output, end: int, prefix: str, *, is_whole: bool) -> str:
    """Returns one output's text up to `end` for a piece of the stream, from its beginning or what is new, and counts it
    as sent."""
    text = prefix + output.text[:end] if is_whole else output.text[output.sent.chars : end]
    output.sent = Sent(len(output.token_ids), end)
    return text
