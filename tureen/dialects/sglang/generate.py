"""SGLang's dialect of `/generate`, its answers and events; `/encode`."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.types import FinishReason, LogprobSpec, TokenLogprob
from tureen.dialects.sglang import body as sglang_request
from tureen.dialects.sglang.body import GenerateBody, GeneratePlan
from tureen.errors import InvalidRequest, TureenError
from tureen.http.dialect import Docs, Entry, client_name, prepared, unless_gone
from tureen.http.errors import error_object
from tureen.http.sse import DONE, EventStream, event
from tureen.requests import embedding, planning
from tureen.requests.body import read_json, refuse_unknown
from tureen.requests.drafts import REQUEST_SIZE
from tureen.requests.generation import Output, Run, Sent
from tureen.requests.loading import loading
from tureen.requests.offload import INLINE_CHARS, LARGE, offload
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.sessions import Turn
from tureen.requests.state import Context, ServerState
from tureen.requests.tokenising import resolve

ENCODE_FIELDS = ("text", "input_ids", "input_embeds", "rid", "log_metrics", "priority", "cache_salt", "deadline_ms")

EncodeBody = msgspec.defstruct(
    "EncodeBody",
    [(one.name, one.type, one.default) for one in msgspec.structs.fields(GenerateBody) if one.name in ENCODE_FIELDS],
    forbid_unknown_fields=True,
    namespace={"__doc__": "The fields of `/encode`, which are those of `/generate`."},
)

Answer = dict[str, Any]

HIDDEN_FIELD = "hidden_states"


def _as_list(numbers: NDArray[np.float32]) -> list[Any]:
    """A matrix row by row: between rows, an encoder in a thread lets the event loop go on."""
    return list(numbers) if numbers.ndim == 2 else numbers.tolist()


_json = msgspec.json.Encoder(enc_hook=_as_list)


def routes(state: ServerState) -> list[Entry]:
    async def encode(request: Request) -> ASGIApp:
        given = read_json(request.headers.get("content-type"), await request.body())
        body = embedding_body(given)
        plan = await prepared(request, prepare(body, state, owner=client_name(request), takes_media=False))
        answers = await unless_gone(request, embed(plan, state))
        return Response(_json.encode(answers), media_type="application/json")

    docs = Docs(
        "SGLang", "Embed prompts: the last token's hidden state.", bodies=(EncodeBody,), example={"text": "Paris"}
    )
    return [Entry("/encode", encode, access="user", methods=["POST", "PUT"], any_model=True, docs=docs)]


async def respond(given: dict[str, Any], request: Request, state: ServerState) -> ASGIApp:
    """The answer to a body of this dialect: an object, a list, or a stream of events."""
    brings_media = given.get("image_data") is not None or given.get("video_data") is not None
    work = prepare(given, state, owner=client_name(request))
    plan = await prepared(request, work, takes_time=brings_media)
    if plan.stream:
        answers = stream(plan, state)
        first = await unless_gone(request, anext(answers))
        return EventStream(_events(first, answers, is_cumulative=not state.context.config.incremental_streaming_output))
    whole = await unless_gone(request, answer(plan, state))
    return Response(await _encode(whole), media_type="application/json")


async def _encode(answers: Answer | list[Answer]) -> bytes:
    """JSON."""
    every = answers if isinstance(answers, list) else [answers]
    is_large = any(HIDDEN_FIELD in one["meta_info"] for one in every)
    return await offload.run(LARGE if is_large else 0, lambda: _json.encode(answers))


def as_builtins(answers: Answer | list[Answer]) -> Any:
    """An answer as a client gets it, of lists and numbers alone."""
    return msgspec.to_builtins(answers, enc_hook=_as_list)


async def prepare(
    given: dict[str, Any], state: ServerState, *, owner: str = "", takes_media: bool = True
) -> GeneratePlan:
    """A body becomes requests. Raises InvalidRequest; nothing has been submitted then. `owner` is who asks."""
    arrived_s = time.monotonic()
    state.check_accepting()
    context = state.context
    body, found = await offload.run(sglang_request.size_of(given), lambda: sglang_request.parse(given, context))
    batch = len(found.texts) if isinstance(found, Texts) else len(found)
    size = sglang_request.sampling_size(body)
    samplings = await offload.run(size, lambda: sglang_request.samplings_of(body, batch, context))
    for name, field in sglang_request.adapters_of(body, batch):
        state.check_adapter(name, field)
    num_samples = planning.check_size(batch, samplings, body.prompt_field)
    names = [body.prompt_name(index) for index in range(batch)]
    wanted = sglang_request.wanted_media(body, batch)
    if not takes_media:
        wanted = [one._replace(picture_field=name) for one, name in zip(wanted, names, strict=True)]
    async with contextlib.AsyncExitStack() as stack:
        if any(one.pictures or one.videos for one in wanted):
            rids, _ = planning.name_requests(body.rid, batch, num_samples, is_batch=body.is_batch)
            await stack.enter_async_context(loading(state, owner, rids, sglang_request.limits_of(body)))
        found = await resolve(found, names, state, wanted)
    rest = sglang_request.after(time.monotonic() - arrived_s, body)
    turns: list[Turn | None] = []
    for index, session in enumerate(sglang_request.session_params_of(body, len(found))):
        turns.append(None)
        if session is not None:
            if samplings[index].params.n > 1:
                raise InvalidRequest("session_params cannot go with n > 1; send n requests", field="session_params")
            turn = turns[index] = state.sessions.extend(session, found[index].token_ids, owner=owner)
            found[index] = Prompt(turn.token_ids)
    # a session is not to change between a turn that is read from it and the one that begins
    size = 0 if any(turns) else batch * num_samples * REQUEST_SIZE
    plan = await offload.run(
        size, lambda: sglang_request.plan(rest, found, samplings, state, owner=owner, arrived_s=arrived_s)
    )
    return msgspec.structs.replace(plan, turns=tuple(turns)) if any(turns) else plan


async def answer(plan: GeneratePlan, state: ServerState) -> Answer | list[Answer]:
    """The whole answer: an object, or a list of them for a batch or n > 1."""
    run = Run(state, plan.plan)
    with _taking_turns(plan, run, state) as end_turn:
        # a session's output is looked at by who replaces it before it ends
        outputs = await (run.whole(interval=1) if any(plan.turns) else run.whole())
        for output in outputs:
            end_turn(output)
    size = sum(output.num_logprobs for output in outputs)
    answers = await offload.run_each(size, lambda output: render(output, plan, state.context), outputs)
    return answers if plan.is_list else answers[0]


async def stream(plan: GeneratePlan, state: ServerState) -> AsyncGenerator[Answer, None]:
    """The answer as it grows, an object per event; cumulative unless the server was told otherwise."""
    run = Run(state, plan.plan)
    with _taking_turns(plan, run, state) as end_turn:
        # a session's output is looked at by who replaces it before it ends
        has_turns = any(plan.turns)
        async with contextlib.aclosing(run.events(1 if has_turns else None)) as events:
            async for event in events:
                output = event.output
                if has_turns and not _is_due(output, state.context.config.stream_interval):
                    continue
                one = await _rendered(output, plan, state.context)
                if plan.is_list:
                    one["index"] = output.index
                if one["meta_info"]["finish_reason"] is not None:
                    end_turn(output)  # before the client hears of it: it may continue at once
                yield one


async def _rendered(output: Output, plan: GeneratePlan, context: Context) -> Answer:
    """The event of a stream that tells what there is; it counts as sent."""
    only_new, size = context.config.incremental_streaming_output, output.num_logprobs
    now = output.snapshot() if size > INLINE_CHARS else output
    output.sent, sent = Sent(len(now.token_ids), len(now.text)), now.sent
    return await offload.run(size, lambda: render(now, plan, context, sent if only_new else (0, 0)))


def _is_due(output: Output, stream_interval: int) -> bool:
    """Whether there is enough for an event: the first and the last are always sent."""
    interval = output.request.params.stream_interval or stream_interval
    num_new = len(output.token_ids) - output.sent.tokens
    return output.finish is not None or output.sent.tokens == 0 or num_new >= interval


@contextlib.contextmanager
def _taking_turns(plan: GeneratePlan, run: Run, state: ServerState) -> Iterator[Callable[[Output], None]]:
    """Tell the sessions, where requests belong to some, that these begin and how they end.

    Gives what is to be called with each output that is complete; the others leave nothing behind.
    """
    begun: dict[int, Turn] = {}  # by the output's index

    def end_turn(output: Output) -> None:
        has_failed = output.finish is None or output.finish.type == "error"
        turn = None if has_failed else begun.pop(output.index, None)
        if turn is not None:
            turn.end(output.token_ids)

    if plan.turns:  # what a turn replaces is not to be lost to a request that is refused
        state.check_names(plan.plan.owner, plan.plan.names)
    try:
        for output, turn in zip(run.outputs, plan.turns, strict=False):
            if turn is not None:
                turn.begin(output.rid, output.request.id, output.token_ids)
                begun[output.index] = turn
        yield end_turn
    finally:
        for turn in begun.values():
            turn.end(None)


def embedding_body(given: dict[str, Any]) -> dict[str, Any]:
    """What `/encode` asks for as a `/generate` body. Raises InvalidRequest."""
    refuse_unknown(given, ENCODE_FIELDS)
    fields = {name: value for name, value in given.items() if value is not None}
    return fields | {"return_hidden_states": "last", "sampling_params": {"max_new_tokens": 0}}


async def embed(plan: GeneratePlan, state: ServerState) -> Answer | list[Answer]:
    """The prompts' embeddings, scaled to length 1: the hidden state of the last token, or what an embedding model
    makes."""
    outputs = await Run(state, plan.plan).whole()
    answers = []
    for output in outputs:
        vector = embedding.normalised(embedding.vector_of(output))
        meta = {
            "id": output.rid,
            "finish_reason": finish_reason(output.finish),
            "prompt_tokens": output.usage.prompt_tokens,
            "cached_tokens": output.usage.cached_tokens,
            "e2e_latency": output.elapsed_s,
        }
        answers.append({"embedding": vector.tolist(), "meta_info": meta})
    return answers if plan.is_list else answers[0]


class GrowingEvent:
    """The growing part of an output's cumulative events in JSON: what the event before had is not encoded again."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._num_chars = 0
        self._ids = bytearray()
        self._num_ids = 0

    def extend(self, one: Answer) -> Answer:
        """The same answer, its text and ids encoded."""
        text, ids = one["text"], one["output_ids"]
        self._text += _json.encode(text[self._num_chars :])[1:-1]
        if self._ids and len(ids) > self._num_ids:
            self._ids += b","
        self._ids += _json.encode(ids[self._num_ids :])[1:-1]
        self._num_chars, self._num_ids = len(text), len(ids)
        return one | {"text": msgspec.Raw(b'"' + self._text + b'"'), "output_ids": msgspec.Raw(b"[" + self._ids + b"]")}


async def _events(
    first: Answer, rest: AsyncGenerator[Answer, None], *, is_cumulative: bool
) -> AsyncGenerator[bytes, None]:
    growing: defaultdict[int, GrowingEvent] = defaultdict(GrowingEvent)  # by index

    def encoded(one: Answer) -> Answer:
        return growing[one.get("index", 0)].extend(one) if is_cumulative else one

    try:
        async with contextlib.aclosing(rest):
            yield event(await _encode(encoded(first)))
            async for one in rest:
                yield event(await _encode(encoded(one)))
    except TureenError as error:
        yield event(_json.encode(error_object(error)))
    yield DONE


def render(output: Output, plan: GeneratePlan, context: Context, sent: tuple[int, int] = (0, 0)) -> Answer:
    """One request's answer as SGLang writes it, without the tokens and characters that were sent before.

    Hidden states, and the names that SGLang had for log-probabilities before 0.3, come when the request has ended.
    """
    first_token, first_char = sent
    meta: dict[str, Any] = {
        "id": output.rid,
        "finish_reason": finish_reason(output.finish),
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.usage.cached_tokens,
        "sampling_seed": output.request.seed,
        "weight_version": output.weight_versions[-1],
    }
    if len(output.weight_versions) > 1:
        meta["weight_versions"] = output.weight_versions
    if output.request.grammar is not None:
        meta |= {"forced_tokens": output.usage.forced_tokens, **output.conformity.metadata}
    if plan.effective:
        meta["effective"] = plan.effective[output.index]
    if output.request.logprobs is not None:
        meta |= _logprobs(output, output.request.logprobs, plan, context, first_token)
    if output.finish is not None:
        meta["e2e_latency"] = output.elapsed_s
        if output.request.hidden_states != "none":
            meta[HIDDEN_FIELD] = _hidden_states(output)
    return {"text": output.text[first_char:], "output_ids": output.token_ids[first_token:], "meta_info": meta}


def _logprobs(
    output: Output, spec: LogprobSpec, plan: GeneratePlan, context: Context, first_token: int
) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    prompt = [] if first_token else output.prompt_logprobs  # they come with the first token
    sides = (("input", "prefill", prompt), ("output", "decode", output.output_logprobs[first_token:]))
    for side, old_side, positions in sides:
        meta[f"{side}_token_logprobs"] = [_triple(p.token, plan, context) for p in positions]
        if spec.top:
            meta[f"{side}_top_logprobs"] = [_triples(p.top, plan, context) for p in positions]
        if spec.token_ids:
            meta[f"{side}_token_ids_logprobs"] = [_triples(p.token_ids, plan, context) for p in positions]
        if output.finish is not None:
            for kind in ("token_logprobs", "top_logprobs"):
                if f"{side}_{kind}" in meta:
                    meta[f"{old_side}_{kind}"] = meta[f"{side}_{kind}"]
    if output.finish is not None:
        values = [p.token[0] for p in output.prompt_logprobs if p.token[0] is not None]
        meta["normalized_prompt_logprob"] = sum(values) / len(values) if values else None
    return meta


def _hidden_states(output: Output) -> list[NDArray[np.float32]]:
    """The prompt's matrix, then a vector for each output token but the last; or the last position's vector alone."""
    vectors = [np.frombuffer(one, dtype=np.float32) for one in output.hidden_states]
    if output.request.hidden_states == "last" or not vectors:
        return vectors[-1:]
    num_prompt = len(output.request.token_ids)
    return [np.stack(vectors[:num_prompt]), *vectors[num_prompt:]]


def _triple(logprob: TokenLogprob, plan: GeneratePlan, context: Context) -> list[Any]:
    value, token_id = logprob
    return [value, token_id, context.tokenizer.token_text(token_id) if plan.return_text_in_logprobs else None]


def _triples(logprobs: Sequence[TokenLogprob] | None, plan: GeneratePlan, context: Context) -> list[list[Any]] | None:
    return None if logprobs is None else [_triple(one, plan, context) for one in logprobs]


def finish_reason(finish: FinishReason | None) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": finish.length}
    return {"type": "abort", "message": finish.message, "reason": finish.reason}
