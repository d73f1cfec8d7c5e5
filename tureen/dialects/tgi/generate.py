"""Serves the API of Text Generation Inference: bodies with `inputs` and `parameters` on `/generate`, `/generate_stream`
and `POST /`.

Source: https://huggingface.github.io/text-generation-inference/
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.config import MAX_N
from tureen.contract.params import JsonObject, SamplingParams, Stops
from tureen.contract.types import FinishReason, LogprobSpec
from tureen.errors import InvalidRequest, RequestFailed, TryLater, TureenError
from tureen.fields.body import convert, offered, read_json
from tureen.fields.constraints import named_schema
from tureen.fields.rules import read_tables
from tureen.fields.shared import Explain
from tureen.http.dialect import PLAIN_ERROR, Docs, Entry, client_name, prepared, streamed, unless_gone
from tureen.http.sse import event
from tureen.requests import planning
from tureen.requests.drafts import Options, Plan, one_prompt, plan_of
from tureen.requests.explanations import Explained
from tureen.requests.generation import Output, Run
from tureen.requests.model_field import adapter_of
from tureen.requests.planning import Names
from tureen.requests.prompts import Prompt
from tureen.requests.state import Context, ServerState
from tureen.requests.tokenising import tokenize
from tureen.text.detokenizer import Detokenizer

DEFAULT_MAX_NEW_TOKENS = 20
ERROR_TYPES = {429: "overloaded", 503: "overloaded", 424: "generation"}
ABORTED = "aborted"
NAMES = Names("parameters", {"n": "best_of", "sampling_seed": "seed", "json_schema": "grammar", "regex": "grammar"})
PLAIN = SamplingParams(no_stop_trim=True)
"""Parameters to detokenize with: a stop string stays in the text, as its tokens do in TGI's list of tokens."""

TABLES = read_tables(Path(__file__).with_name("fields.toml"))

_json = msgspec.json.Encoder()


class TgiGrammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The grammar that the output must match."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: str | JsonObject


class TgiParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `parameters`."""

    max_new_tokens: Annotated[int, Meta(ge=1, description="Most tokens to generate.")] = DEFAULT_MAX_NEW_TOKENS
    do_sample: Annotated[
        bool,
        Meta(description="Sample; false, without temperature, top_k, top_p and typical_p, takes the best token."),
    ] = False
    temperature: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="Higher = more varied.")] = None
    top_k: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Keep the k most probable tokens.")] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(description="Keep the smallest set of tokens whose probability reaches it."),
    ] = None
    typical_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Keep the tokens whose surprise is nearest the expected one (locally typical sampling)."),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=2)] | None,
        Meta(description="Tokens of prompt and output: above 1 less likely, below 1 more."),
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None,
        Meta(description="Subtracted once for each time a token is in the output."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(description="Same request, same seed, same tokens. Default: random."),
    ] = None
    stop: Annotated[
        Stops,
        Meta(description="Strings that end the output; they stay in the text. Up to --max-stop-strings, of 1..1024."),
    ] = msgspec.field(default_factory=list)
    return_full_text: Annotated[bool, Meta(description="Put the prompt in front of generated_text.")] = False
    truncate: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Keep only this many tokens of the prompt, the last ones.")
    ] = None
    details: Annotated[bool, Meta(description="Return each token, the seed and the finish reason.")] = False
    decoder_input_details: Annotated[
        bool, Meta(description="The prompt's tokens with log-probabilities, in details.prefill; not in a stream.")
    ] = False
    top_n_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=5)] | None, Meta(description="Best alternatives of each token, in details.")
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_N)] | None,
        Meta(description="Outputs to generate; the most probable one is returned."),
    ] = None
    adapter_id: Annotated[
        str | None, Meta(description="Name of a loaded adapter, or the path it was loaded from; see the adapters page.")
    ] = None
    grammar: Annotated[
        TgiGrammar | None,
        Meta(description='The output matches it: {"type": "json", "value": schema} or {"type": "regex", "value": …}.'),
    ] = None
    explain: Explain = False


class TgiBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body with `inputs`."""

    inputs: Annotated[str, Meta(description="The prompt.", min_length=1)]
    parameters: Annotated[TgiParameters, Meta(description="Sampling parameters, and details to return.")] = (
        TgiParameters()
    )
    stream: Annotated[bool, Meta(description="Answer with server-sent events, one a token.")] = False
    model: Annotated[
        str | None, Meta(description="The served model, or an adapter; other names are reported, or refused.")
    ] = None


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes of this API beside `/generate`, which several dialects share."""

    async def generate_stream(request: Request) -> ASGIApp:
        body = await request.body()
        try:
            payload = read_json(request.headers.get("content-type"), body)
            if payload.get("stream") is not None and payload["stream"] is not True:
                raise InvalidRequest("stream must be true here; use /generate", field="stream")
        except TureenError as error:
            return _error_response(error)
        return await _respond(payload | {"stream": True}, request, state)

    async def root(request: Request) -> ASGIApp:
        body = await request.body()
        try:
            payload = read_json(request.headers.get("content-type"), body)
        except TureenError as error:
            return _error_response(error)
        return await _respond(payload, request, state, in_list=True)

    return [
        Entry("/generate_stream", generate_stream, access="user", methods=["POST"], docs=_docs("Generate, streamed.")),
        Entry("/", root, access="user", methods=["POST"], docs=_docs("Generate; the answer is a list of one.")),
    ]


def _docs(summary: str) -> Docs:
    example = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
    return Docs("TGI", summary, bodies=(TgiBody,), example=example, stream="text/event-stream", error=PLAIN_ERROR)


def error_object(error: TureenError) -> dict[str, str]:
    """Returns an error in TGI's JSON form."""
    status = _status(error)
    kind = ERROR_TYPES.get(status, "validation" if status < 500 else "incomplete_generation")
    return {"error": error.message, "error_type": kind}


def _status(error: TureenError) -> int:
    """Returns TGI's status: 422 for an invalid request, 424 when generating failed, 500 when it was aborted."""
    if error.status == 400:
        return 422
    return 424 if error.status == 500 and error.code != ABORTED else error.status


def _error_response(error: TureenError) -> Response:
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, TryLater) else {}
    return Response(
        _json.encode(error_object(error)), status_code=_status(error), headers=headers, media_type="application/json"
    )


async def respond(payload: dict[str, Any], request: Request, state: ServerState) -> ASGIApp:
    """Answers a body with `inputs` on `/generate`; errors are answers in this dialect's form."""
    return await _respond(payload, request, state)


async def _respond(payload: dict[str, Any], request: Request, state: ServerState, *, in_list: bool = False) -> ASGIApp:
    try:
        state.check_accepting()
        body = parse(payload)
        adapter = adapter_of(body.model, state)
        if body.parameters.adapter_id is not None:
            adapter = body.parameters.adapter_id
            state.check_adapter(adapter, "parameters.adapter_id")
        run = Run(state, await prepared(request, _plan(body, payload, state, client_name(request), adapter)))
        if body.stream:
            events = _events(run, body, state.context)
            return await streamed(request, events, lambda error: event(_json.encode(error_object(error))))
        texts = await unless_gone(request, _collect(run, state.context))
    except TureenError as error:
        return _error_response(error)
    answer = _answer(texts, body, state.context)
    return Response(_json.encode([answer] if in_list else answer), media_type="application/json")


def parse(payload: dict[str, Any]) -> TgiBody:
    """Checks a JSON body's form. Raises InvalidRequest."""
    known = TgiParameters.__struct_fields__
    fields = offered(payload, TgiBody.__struct_fields__, TABLES["body"], inside=known, at="parameters")
    parameters = fields.get("parameters", {})
    if isinstance(parameters, dict):
        fields["parameters"] = offered(parameters, known, TABLES["parameters"], "parameters")
    body = convert(fields, TgiBody, table=TABLES["parameters"])
    checked = body.parameters
    refusals = {
        "grammar": (_is_no_pattern(checked.grammar), "of type regex needs a string value"),
        "decoder_input_details": (checked.decoder_input_details and not checked.details, "needs details: true"),
        "top_n_tokens": (bool(checked.top_n_tokens) and not checked.details, "needs details: true"),
    }
    if body.stream:
        refusals |= {
            "decoder_input_details": (checked.decoder_input_details, "cannot go with a stream"),
            "best_of": ((checked.best_of or 1) > 1, "cannot go with a stream"),
            "top_n_tokens": refusals["top_n_tokens"] if not checked.details else (False, ""),
        }
    for name, (is_wrong, why) in refusals.items():
        if is_wrong:
            raise InvalidRequest(f"parameters.{name} {why}", field=f"parameters.{name}")
    return body


def _is_no_pattern(grammar: TgiGrammar | None) -> bool:
    return grammar is not None and grammar.type == "regex" and not isinstance(grammar.value, str)


def _samples(parameters: TgiParameters) -> bool:
    """Returns whether tokens are drawn; otherwise the most probable one is taken."""
    cuts = (parameters.temperature, parameters.top_k, parameters.top_p)
    return parameters.do_sample or any(cut is not None for cut in cuts) or parameters.typical_p not in (None, 1)


async def _plan(body: TgiBody, payload: dict[str, Any], state: ServerState, owner: str, adapter: str) -> Plan:
    parameters, context = body.parameters, state.context
    names = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "stop")
    fields: dict[str, Any] = {
        name: getattr(parameters, name) for name in names if getattr(parameters, name) is not None
    }
    if (payload.get("parameters") or {}).get("max_new_tokens") is not None:
        fields["max_new_tokens"] = parameters.max_new_tokens
    if parameters.seed is not None:
        fields["sampling_seed"] = parameters.seed
    if parameters.grammar is not None:
        value = parameters.grammar.value
        fields |= {"regex": value} if parameters.grammar.type == "regex" else {"json_schema": named_schema(value)}
    count = parameters.best_of or 1
    defaults: dict[str, Any] = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS, "no_stop_trim": True}
    if not _samples(parameters):
        defaults["temperature"] = 0.0
    sampling = planning.make_sampling(fields | {"n": count}, context, NAMES, defaults)
    if count > 1 and sampling.params.is_greedy:
        raise InvalidRequest("parameters.best_of needs do_sample: true, or a temperature", field="parameters.best_of")
    [ids] = await tokenize([body.inputs], ["inputs"], context)
    prompt = Prompt(ids[-parameters.truncate :] if parameters.truncate else ids)
    options = Options(adapter=adapter, logprobs=_logprobs(body), explain=parameters.explain)
    return plan_of(one_prompt(prompt, "inputs", sampling, options, owner=owner), state)


def _logprobs(body: TgiBody) -> LogprobSpec | None:
    """Returns the log-probabilities to compute; None when neither the answer nor best_of needs them."""
    parameters = body.parameters
    if not (parameters.details or body.stream or parameters.best_of):
        return None
    return LogprobSpec(0 if parameters.decoder_input_details else -1, parameters.top_n_tokens or 0)


def _token(texts: TokenTexts, index: int, context: Context) -> dict[str, Any]:
    token_id = texts.output.token_ids[index]
    return {
        "id": token_id,
        "text": texts.pieces[index],
        "logprob": texts.output.output_logprobs[index].token[0],
        "special": token_id in context.tokenizer.special_ids,
    }


def _alternatives(output: Output, index: int, context: Context) -> list[dict[str, Any]]:
    tokenizer = context.tokenizer
    return [
        {
            "id": token_id,
            "text": tokenizer.token_text(token_id),
            "logprob": logprob,
            "special": token_id in tokenizer.special_ids,
        }
        for logprob, token_id in output.output_logprobs[index].top or ()
    ]


class TokenTexts:
    """Splits an output's text into a piece for each token; a character of several tokens belongs to the last of
    them."""

    def __init__(self, output: Output, context: Context) -> None:
        self.output = output
        self.pieces: list[str] = []
        self._detokenizer = Detokenizer(context.tokenizer, PLAIN)

    @property
    def whole(self) -> str:
        """The text of all tokens so far."""
        return "".join(self.pieces)

    def catch_up(self) -> range:
        """Adds the output's new tokens and returns their indices. Raises RequestFailed for an output that was
        aborted."""
        output, before = self.output, len(self.pieces)
        if output.finish is not None and output.finish.type == "abort":
            raise RequestFailed(f"the request was ended ({output.finish.reason})", code=ABORTED)
        for token_id in output.token_ids[before:]:
            self._detokenizer.append(token_id, stops_allowed=False)
            self.pieces.append(self._detokenizer.take())
        if output.finish is not None and self.pieces:
            self.pieces[-1] = _cut(
                "".join(self.pieces[:-1]), self.pieces[-1] + self._detokenizer.close(), output.finish.matched
            )
        return range(before, len(self.pieces))


def _cut(text: str, piece: str, stop: int | str | None) -> str:
    """Returns the last token's piece up to the end of the stop string that it completes. `text`: all before it."""
    if not isinstance(stop, str):
        return piece
    start = (text + piece).find(stop, max(0, len(text) - len(stop) + 1))
    return piece if start < 0 else piece[: start + len(stop) - len(text)]


async def _collect(run: Run, context: Context) -> list[TokenTexts]:
    """Waits for all outputs and returns them, the highest cumulative log-probability first."""
    texts = [TokenTexts(output, context) for output in await run.whole()]
    for output_texts in texts:
        output_texts.catch_up()
    return sorted(texts, key=lambda output_texts: output_texts.output.cumulative_logprob, reverse=True)


def _answer(texts: list[TokenTexts], body: TgiBody, context: Context) -> dict[str, Any]:
    best, *others = texts
    prefix = body.inputs if body.parameters.return_full_text else ""
    answer: dict[str, Any] = {"generated_text": prefix + best.whole}
    if not body.parameters.details:
        return answer | best.output.constraint_notes | Explained(context).new(best.output)
    answer["details"] = _details(best, body, context)
    if others:
        answer["details"]["best_of_sequences"] = [
            {"generated_text": prefix + sample.whole} | _details(sample, body, context) for sample in others
        ]
    return answer


def _details(texts: TokenTexts, body: TgiBody, context: Context) -> dict[str, Any]:
    tokenizer, output = context.tokenizer, texts.output
    details: dict[str, Any] = _summary(output) | {
        "prefill": [
            {"id": token_id, "text": tokenizer.token_text(token_id), "logprob": logprob}
            for logprob, token_id in (position.token for position in output.prompt_logprobs)
        ],
        "tokens": [_token(texts, index, context) for index in range(len(texts.pieces))],
    }
    if body.parameters.top_n_tokens:
        details["top_tokens"] = [_alternatives(output, index, context) for index in range(len(texts.pieces))]
    return details | Explained(context).new(output)


def _summary(output: Output) -> dict[str, Any]:
    return {
        "finish_reason": _finish_reason(output.finish),
        "generated_tokens": len(output.token_ids),
        "seed": None if output.request.params.is_greedy else output.request.seed,
        **output.constraint_notes,
    }


def _finish_reason(finish: FinishReason | None) -> str | None:
    if finish is None or finish.type == "length":
        return None if finish is None else "length"
    return "stop_sequence" if isinstance(finish.matched, str) else "eos_token"


async def _events(run: Run, body: TgiBody, context: Context) -> AsyncGenerator[bytes, None]:
    """Yields an event a token; the last has the whole text and the finish reason. An output without tokens is one event
    too."""
    prefix = body.inputs if body.parameters.return_full_text else ""
    [output] = run.outputs
    texts, explained = TokenTexts(output, context), Explained(context)
    async with contextlib.aclosing(run.events(interval=1)) as events:
        async for _ in events:
            for index in texts.catch_up():
                is_last = output.finish is not None and index + 1 == len(output.token_ids)
                token_event = {
                    "index": index + 1,
                    "token": _token(texts, index, context),
                    "generated_text": prefix + texts.whole if is_last else None,
                    "details": _summary(output) | {"input_length": output.usage.prompt_tokens} if is_last else None,
                }
                if body.parameters.top_n_tokens:
                    token_event["top_tokens"] = _alternatives(output, index, context)
                yield event(_json.encode(token_event | explained.new(output)))
    if not texts.pieces:
        details = _summary(output) | {"input_length": output.usage.prompt_tokens}
        yield event(_json.encode({"index": 0, "token": None, "generated_text": prefix, "details": details}))
