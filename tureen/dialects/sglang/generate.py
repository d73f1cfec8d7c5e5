"""Serves SGLang's `/generate`, with its answers and events, and `/encode`.

Source: https://docs.sglang.io/basic_usage/native_api.html
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.params import DRAWING
from tureen.contract.types import FinishReason, LogprobSpec, TokenLogprob, Usage
from tureen.dialects.sglang import body as sglang_request
from tureen.dialects.sglang.body import ENCODE_FIELDS, GenerateBody, GeneratePlan
from tureen.dialects.sglang.logprob_fields import draw_facts
from tureen.fields import ignored
from tureen.fields.body import offered, read_json
from tureen.http.chat_answer import ChatRun
from tureen.http.dialect import Docs, Entry, client_name, prepared, streamed, unless_gone
from tureen.http.errors import error_object
from tureen.http.sse import DONE, event
from tureen.requests import embedding, planning
from tureen.requests.drafts import REQUEST_SIZE
from tureen.requests.explanations import rendered, version_ranges
from tureen.requests.generation import WHOLE_INTERVAL, Output, Run, Sent
from tureen.requests.media_fields import loading
from tureen.requests.model_field import check_kind
from tureen.requests.offload import INLINE_CHARS, LARGE, offload
from tureen.requests.prompts import Prompt, shown_ids
from tureen.requests.state import Context, ServerState
from tureen.requests.thinking_budget import budgeted
from tureen.requests.tokenising import resolve
from tureen.sessions.sessions import Turn

EncodeBody = msgspec.defstruct(
    "EncodeBody",
    [
        (field.name, field.type, field.default)
        for field in msgspec.structs.fields(GenerateBody)
        if field.name in ENCODE_FIELDS
    ],
    forbid_unknown_fields=True,
    namespace={"__doc__": "The fields of `/encode`, which are those of `/generate`."},
)

ENCODE_TABLE = sglang_request.TABLES["body"].joined(sglang_request.TABLES["encode"])

Answer = dict[str, Any]

HIDDEN_FIELD = "hidden_states"


def _as_list(numbers: NDArray[np.float32]) -> list[Any]:
    """Returns a matrix as a list of rows, which the JSON encoder asks for one by one: so it releases the GIL between
    them."""
    return list(numbers) if numbers.ndim == 2 else numbers.tolist()


_json = msgspec.json.Encoder(enc_hook=_as_list)


def routes(state: ServerState) -> list[Entry]:
    """Returns the route `/encode`; `/generate` is shared by several dialects."""

    async def encode(request: Request) -> ASGIApp:
        payload = read_json(request.headers.get("content-type"), await request.body())
        check_kind(state.context.info, "embedder", "generator")
        body = embedding_body(payload)
        plan = await prepared(request, prepare(body, state, owner=client_name(request), takes_media=False))
        answers = await unless_gone(request, embed(plan, state))
        return Response(_json.encode(answers), media_type="application/json")

    docs = Docs("SGLang", "Embed prompts with the model's pooling.", bodies=(EncodeBody,), example={"text": "Paris"})
    return [Entry("/encode", encode, access="user", methods=["POST", "PUT"], any_model=True, docs=docs)]


async def respond(payload: dict[str, Any], request: Request, state: ServerState) -> ASGIApp:
    """Answers a body of this dialect: with an object, a list, or a stream of events."""
    brings_media = payload.get("image_data") is not None or payload.get("video_data") is not None
    work = prepare(payload, state, owner=client_name(request))
    plan = await prepared(request, work, takes_time=brings_media)
    if plan.stream:
        events = _events(stream(plan, state), is_cumulative=not state.context.config.incremental_streaming_output)
        return await streamed(request, events, lambda error: event(_json.encode(error_object(error))), end=DONE)
    whole = await unless_gone(request, answer(plan, state))
    return Response(await encode(whole, whole), media_type="application/json")


async def encode(whole: Any, answers: Answer | list[Answer]) -> bytes:
    """Encodes as JSON `whole`, which holds the answers, in a thread when they have hidden states."""
    answer_list = answers if isinstance(answers, list) else [answers]
    is_large = any(HIDDEN_FIELD in answer["meta_info"] for answer in answer_list)
    return await offload.run(LARGE if is_large else 0, _json.encode, whole)


def as_builtins(answers: Answer | list[Answer]) -> Any:
    """Returns answers as a client decodes them, arrays as lists of numbers."""
    return msgspec.to_builtins(answers, enc_hook=_as_list)


async def prepare(
    payload: dict[str, Any], state: ServerState, *, owner: str = "", takes_media: bool = True
) -> GeneratePlan:
    """Converts a body to requests, tokenizes its prompts and loads its pictures; nothing is submitted.

    `owner`: the client; `takes_media`: false for `/encode`, whose errors name the prompt instead of a field of
    pictures. Raises Unavailable, InvalidRequest, NotFound, Forbidden.
    """
    arrived_s = time.monotonic()
    state.check_accepting()
    if payload.get("model") is not None:
        payload = sglang_request.with_adapter(payload, state)
    parsed = await offload.run(sglang_request.size_of(payload), sglang_request.parse, payload, state.context)
    for name, field in sglang_request.adapters_of(parsed):
        state.check_adapter(name, field)
    body, batch, media = parsed.body, len(parsed.names), parsed.media
    if not takes_media:
        media = [item._replace(picture_field=name) for item, name in zip(media, parsed.names, strict=True)]
    async with contextlib.AsyncExitStack() as stack:
        if any(item.pictures or item.videos for item in media):
            rids, _ = planning.name_requests(body.rid, batch, parsed.num_samples, is_batch=parsed.is_batch)
            await stack.enter_async_context(loading(state, owner, rids, sglang_request.limits_of(body)))
        inputs = await resolve(parsed.inputs, parsed.names, state, media)
    turns: list[Turn | None] = []
    for index, session in enumerate(parsed.sessions):
        if session is None:
            turns += [None] * parsed.num_samples
        else:
            turn = state.sessions.extend(session, inputs[index].token_ids, owner=owner)
            inputs[index] = Prompt(turn.token_ids)
            turns += turn.branches(parsed.num_samples)
    # with sessions no thread is waited for: a session must not change between `extend` and `begin`
    size = 0 if any(turns) else batch * parsed.num_samples * REQUEST_SIZE
    plan = await offload.run(size, sglang_request.plan, parsed, inputs, state, owner=owner, arrived_s=arrived_s)
    return msgspec.structs.replace(plan, turns=tuple(turns)) if any(turns) else plan


async def answer(plan: GeneratePlan, state: ServerState) -> Answer | list[Answer]:
    """Runs the requests and returns the whole answer: an object, or a list of them for a batch or n > 1."""
    run = _run_of(plan, state)
    with _taking_turns(plan, run, state) as end_turn:
        # of a session's request every token is followed: another one may replace it and read its output before its end
        outputs = await _whole(run, 1 if any(plan.turns) else WHOLE_INTERVAL)
        for output in outputs:
            end_turn(output)
    if turns := [turn for turn in plan.turns if turn is not None]:
        await state.sessions.saved(*(turn.session for turn in turns))
    size = sum(output.num_logprobs for output in outputs)
    answers = await offload.run_each(size, lambda output: render(output, plan, state.context), outputs)
    return answers if plan.is_list else answers[0]


def _run_of(plan: GeneratePlan, state: ServerState) -> ChatRun:
    return Run(state, plan.plan) if plan.budget is None else budgeted(state, plan.plan, plan.budget)


async def _whole(run: ChatRun, interval: int) -> list[Output]:
    """Waits until all outputs have ended, and returns them."""
    if isinstance(run, Run):
        return await run.whole(interval)
    async with contextlib.aclosing(run.events(interval)) as events:
        async for _ in events:
            pass
    return run.outputs


async def stream(plan: GeneratePlan, state: ServerState) -> AsyncGenerator[Answer, None]:
    """Runs the requests and yields the answer as it grows, an object an event; each has all the text so far, unless the
    server runs with --incremental-streaming-output."""
    run = _run_of(plan, state)
    with _taking_turns(plan, run, state) as end_turn:
        # of a session's request every token is followed, as in `answer`
        has_turns = any(plan.turns)
        async with contextlib.aclosing(run.events(1 if has_turns else None)) as events:
            async for event in events:
                output = event.output
                if has_turns and not _is_due(output, state.context.config.stream_interval):
                    continue
                rendered = await _rendered(output, plan, state.context)
                if plan.is_list:
                    rendered["index"] = output.index
                if rendered["meta_info"]["finish_reason"] is not None:
                    end_turn(output)  # before the client sees the end: it may continue the session at once
                    turn = plan.turns[output.index] if has_turns else None
                    if turn is not None:
                        await state.sessions.saved(turn.session)
                yield rendered


async def _rendered(output: Output, plan: GeneratePlan, context: Context) -> Answer:
    """Renders an event with the output so far, and counts it as sent."""
    only_new, size = context.config.incremental_streaming_output, output.num_logprobs
    now = output.snapshot() if size > INLINE_CHARS else output
    output.sent, sent = Sent(len(now.token_ids), len(now.text)), now.sent
    return await offload.run(size, render, now, plan, context, sent if only_new else (0, 0), sent.tokens)


def _is_due(output: Output, stream_interval: int | Literal["auto"]) -> bool:
    """Returns whether there are enough new tokens for an event; the first and the last event are always sent."""
    interval = output.request.params.stream_interval or (1 if stream_interval == "auto" else stream_interval)
    num_new = len(output.token_ids) - output.sent.tokens
    return output.finish is not None or output.sent.tokens == 0 or num_new >= interval


@contextlib.contextmanager
def _taking_turns(plan: GeneratePlan, run: ChatRun, state: ServerState) -> Iterator[Callable[[Output], None]]:
    """Registers requests that continue sessions with them while the block runs.

    Gives a function to call with each output that is complete; outputs without that call are not stored.
    """
    begun: dict[int, Turn] = {}  # index of an output -> its turn
    names, num_samples = plan.plan.rids, plan.num_samples

    def end_turn(output: Output) -> None:
        has_failed = output.finish is None or output.finish.type == "error"
        turn = None if has_failed else begun.pop(output.index, None)
        if turn is not None:
            turn.end(output.token_ids)

    if plan.turns:  # checked first: `begin` removes requests, which must not happen for a request that is refused
        state.check_names(plan.plan.owner, plan.plan.names)
    try:
        for output, turn in zip(run.outputs, plan.turns, strict=False):
            if turn is not None:
                also = [] if output.index % num_samples else names[output.index + 1 : output.index + num_samples]
                turn.begin(output.rid, output.request.id, output.token_ids, also, adapter=output.request.adapter)
                begun[output.index] = turn
        yield end_turn
    finally:
        for turn in begun.values():
            turn.end(None)


def _changes(output: Output, plan: GeneratePlan) -> Answer:
    """Returns what else than was to be expected has computed an output, for its meta_info."""
    turn = plan.turns[output.index] if plan.turns else None
    changes: Answer = {} if turn is None or not turn.changes else {"session_changes": turn.changes}
    return changes | {"hardware": output.remarks.hardware} if output.remarks.hardware else changes


def _guesses(usage: Usage) -> Answer:
    """Returns SGLang's figures of speculative decoding, in which each step that draws a token verifies."""
    if not usage.guessed_tokens:
        return {}
    num_drawn = usage.output_tokens - usage.forced_tokens
    num_steps = num_drawn - usage.right_guesses
    return {
        "spec_verify_ct": num_steps,
        "spec_draft_token_num": usage.guessed_tokens,
        "spec_accept_token_num": usage.right_guesses,
        "spec_accept_rate": usage.right_guesses / usage.guessed_tokens,
        "spec_accept_length": num_drawn / max(1, num_steps),
    }


def embedding_body(payload: dict[str, Any]) -> dict[str, Any]:
    """Converts a body of `/encode` to one of `/generate`. Raises InvalidRequest."""
    fields = offered(payload, ENCODE_FIELDS, ENCODE_TABLE)
    return fields | {"return_hidden_states": "last", "sampling_params": {"max_new_tokens": 0}}


async def embed(plan: GeneratePlan, state: ServerState) -> Answer | list[Answer]:
    """Runs the requests and returns the prompts' embeddings by the model's own pooling, scaled to length 1."""
    pooling = embedding.states_for(None, state.context.info)
    requests = tuple(msgspec.structs.replace(request, hidden_states=pooling) for request in plan.plan.requests)
    outputs = await Run(state, msgspec.structs.replace(plan.plan, requests=requests)).whole()
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
    """Encodes the growing fields of an output's cumulative events: only what is new since the event before is
    encoded."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._num_chars = 0
        self._ids = bytearray()
        self._num_ids = 0

    def extend(self, answer: Answer) -> Answer:
        """Returns the answer with text and token ids encoded as JSON. They must continue those of the last call."""
        text, ids = answer["text"], answer["output_ids"]
        self._text += _json.encode(text[self._num_chars :])[1:-1]
        if self._ids and len(ids) > self._num_ids:
            self._ids += b","
        self._ids += _json.encode(ids[self._num_ids :])[1:-1]
        self._num_chars, self._num_ids = len(text), len(ids)
        return answer | {
            "text": msgspec.Raw(b'"' + self._text + b'"'),
            "output_ids": msgspec.Raw(b"[" + self._ids + b"]"),
        }


async def _events(answers: AsyncGenerator[Answer, None], *, is_cumulative: bool) -> AsyncGenerator[bytes, None]:
    growing: defaultdict[int, GrowingEvent] = defaultdict(GrowingEvent)  # index of an output -> its encoder
    async with contextlib.aclosing(answers):
        async for update in answers:
            grown = growing[update.get("index", 0)].extend(update) if is_cumulative else update
            yield event(await encode(grown, grown))


def render(
    output: Output,
    plan: GeneratePlan,
    context: Context,
    sent: tuple[int, int] = (0, 0),
    num_explained: int = 0,
) -> Answer:
    """Returns one request's answer in SGLang's form. `sent`: tokens and characters that are left out, as sent before.
    `num_explained`: tokens whose explanations were sent before; no event has them again.

    Hidden states, and log-probabilities under the names of SGLang before 0.3, come when the request has ended.
    """
    first_token, first_char = sent
    meta: dict[str, Any] = {
        "id": output.rid,
        "finish_reason": finish_reason(output.finish),
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.usage.cached_tokens,
        "sampling_seed": output.request.seed,
        "weight_version": output.versions[-1][0],
    }
    if len(output.versions) > 1:
        meta["weight_versions"] = [version for version, _ in output.versions]
        meta["weight_version_ranges"] = version_ranges(output)
    meta |= _changes(output, plan) | _guesses(output.usage)
    if output.request.grammar is not None:
        meta |= {"forced_tokens": output.usage.forced_tokens, **output.constraint_notes}
    if output.remarks.effective is not None:
        meta["effective"] = output.remarks.effective
    if output.request.logprobs is not None:
        meta |= _logprobs(output, output.request.logprobs, plan, context, first_token)
    if output.request.explain:
        meta["explanations"] = rendered(output.remarks.explanations[num_explained : len(output.token_ids)], context)
    if output.finish is not None:
        meta |= _end_facts(output)
        told = ignored.current.get()
        if told is not None and told.paths:
            meta[ignored.ANSWER_FIELD] = told.listed()
        if output.request.hidden_states != "none":
            meta[HIDDEN_FIELD] = _hidden_states(output)
    answer: Answer = {"text": output.text[first_char:], "output_ids": output.token_ids[first_token:], "meta_info": meta}
    if plan.return_prompt_token_ids and (not num_explained or output.finish is not None):  # a stream has them twice
        answer["prompt_token_ids"] = shown_ids(output.request.token_ids, context)
    return answer


def _end_facts(output: Output) -> dict[str, Any]:
    """Returns the facts about a finished output in meta_info, by SGLang's names."""
    usage = output.usage
    loaded = {"storage": usage.loaded_tokens} if usage.loaded_tokens else {}
    return {
        "e2e_latency": output.elapsed_s,
        "cached_tokens_details": {"device": usage.cached_tokens - usage.loaded_tokens, "host": 0, **loaded},
        "num_retractions": usage.preemptions,
        **{f"sampling_{name}": getattr(output.request.params, name) for name in DRAWING},
    }


def _logprobs(
    output: Output, spec: LogprobSpec, plan: GeneratePlan, context: Context, first_token: int
) -> dict[str, Any]:
    meta = draw_facts(output, spec, first_token)
    if not plan.shows_logprobs[output.index // plan.num_samples]:
        return meta
    prompt = [] if first_token else output.prompt_logprobs  # sent with the first token
    drawn = output.output_logprobs[first_token:]
    sides = [("input", "prefill", prompt), ("output", "decode", drawn)]
    if spec.mode == "both":  # a forced token was not drawn: it has the model's own alone
        sides.append(("raw_output", "", [position.raw or position for position in drawn]))
    for side, old_side, positions in sides:
        meta[f"{side}_token_logprobs"] = [_triple(p.token, plan, context) for p in positions]
        if spec.top:
            meta[f"{side}_top_logprobs"] = [_triples(p.top, plan, context) for p in positions]
        if spec.token_ids:
            meta[f"{side}_token_ids_logprobs"] = [_triples(p.token_ids, plan, context) for p in positions]
        if output.finish is not None:
            for kind in ("token_logprobs", "top_logprobs"):
                if old_side and f"{side}_{kind}" in meta:
                    meta[f"{old_side}_{kind}"] = meta[f"{side}_{kind}"]
    if output.finish is not None:
        values = [p.token[0] for p in output.prompt_logprobs if p.token[0] is not None]
        meta["normalized_prompt_logprob"] = sum(values) / len(values) if values else None
    return meta


def _hidden_states(output: Output) -> list[NDArray[np.float32]]:
    """Returns the prompt's matrix [tokens, hidden_size], then a vector for each output token but the last; or only the
    last position's vector."""
    vectors = [np.frombuffer(state, dtype=np.float32) for state in output.hidden_states]
    if output.request.hidden_states == "last" or not vectors:
        return vectors[-1:]
    num_prompt = len(output.request.token_ids)
    return [np.stack(vectors[:num_prompt]), *vectors[num_prompt:]]


def _triple(logprob: TokenLogprob, plan: GeneratePlan, context: Context) -> list[Any]:
    value, token_id = logprob
    return [value, token_id, context.tokenizer.token_text(token_id) if plan.return_text_in_logprobs else None]


def _triples(logprobs: Sequence[TokenLogprob] | None, plan: GeneratePlan, context: Context) -> list[list[Any]] | None:
    return None if logprobs is None else [_triple(logprob, plan, context) for logprob in logprobs]


def finish_reason(finish: FinishReason | None) -> dict[str, Any] | None:
    """Returns SGLang's finish reason; None while the output goes on."""
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.pattern or finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": finish.length}
    return {"type": "abort", "message": finish.message, "reason": finish.reason}
