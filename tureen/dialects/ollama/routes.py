"""Serves Ollama's API: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/version`.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from tureen.clients.quotas import current_work
from tureen.contract.types import LEAST_LOGPROB, PositionLogprobs, TokenLogprob
from tureen.dialects.ollama.body import (
    TABLES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaShowBody,
    asks_to_unload,
    parse,
    sampling_of,
)
from tureen.dialects.ollama.conversation import DEFAULTS, NAMES, chat_of, prompt_chat
from tureen.dialects.ollama.embed import OllamaEmbedBody, OllamaEmbeddingsBody, embed, embed_prompt
from tureen.dialects.ollama.embed import parse as parse_embedding
from tureen.dialects.ollama.facts import model_card, named_card, running_card, shown
from tureen.errors import InvalidRequest, TureenError
from tureen.fields import ignored
from tureen.fields.body import convert, offered, read_json, require_equal
from tureen.fields.tools import call_id
from tureen.http.chat_answer import arguments_of, check_complete, events_of, prepare_chat
from tureen.http.dialect import PLAIN_ERROR, Docs, Entry, client_name, read_body_with, streamed, unless_gone
from tureen.http.errors import error_answer
from tureen.requests import planning
from tureen.requests.chat import Chat
from tureen.requests.drafts import Options, Plan, one_prompt, plan_of
from tureen.requests.explanations import Explained
from tureen.requests.generation import WHOLE_INTERVAL, Output
from tureen.requests.model_field import adapter_of
from tureen.requests.prompts import Prompt
from tureen.requests.state import Context, ServerState
from tureen.requests.tokenising import tokenize
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning

API_VERSION = "0.12.6"
"""Version of Ollama whose API this is; clients read it to know which fields they may send."""

FAR = "9999-12-31T23:59:59Z"
"""A time in the far future: a model stays until other models need its room."""

NDJSON = "application/x-ndjson"
NS = 1_000_000_000
EXAMPLE = {"model": "default", "stream": False, "options": {"num_predict": 16}}

_json = msgspec.json.Encoder()


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes of this API."""

    async def answer_chat(request: Request) -> ASGIApp:
        def read(payload: dict[str, Any]) -> tuple[OllamaChatBody, Chat | None]:
            body = parse(payload, OllamaChatBody, state.context)
            return body, chat_of(body, payload, state) if body.messages else None

        body, chat = await read_body_with(request, read, of_any_type=True)
        _note_keep_alive(body.keep_alive, state)
        if chat is None:
            adapter_of(body.model, state)
            return Response(_json.encode(_loaded(body, "chat")), media_type="application/json")
        plan = await prepare_chat(chat, request, state)
        return await _respond(request, state, plan, OllamaAnswer(body, "chat"))

    async def generate(request: Request) -> ASGIApp:
        payload = read_json(None, await request.body())
        body = parse(payload, OllamaGenerateBody, state.context)
        _note_keep_alive(body.keep_alive, state)
        if not body.prompt:
            adapter_of(body.model, state)
            return Response(_json.encode(_loaded(body, "generate")), media_type="application/json")
        if body.raw:
            plan = await _raw_plan(body, payload, state, client_name(request))
        else:
            plan = await prepare_chat(prompt_chat(body, payload, state), request, state)
        return await _respond(request, state, plan, OllamaAnswer(body, "generate"))

    message = {"messages": [{"role": "user", "content": "Hello"}]}
    return [
        _entry("/api/chat", answer_chat, _docs("The next message of a chat.", OllamaChatBody, EXAMPLE | message)),
        _entry(
            "/api/generate",
            generate,
            _docs("An answer to a prompt.", OllamaGenerateBody, EXAMPLE | {"prompt": "Hello"}),
        ),
        *_embedding_routes(state),
        *_fact_routes(state),
    ]


def _embedding_routes(state: ServerState) -> list[Entry]:
    async def embed_texts(request: Request) -> ASGIApp:
        body = parse_embedding(read_json(None, await request.body()), OllamaEmbedBody, state.context)
        _note_keep_alive(body.keep_alive, state)
        return _answered(await embed(body, request, state))

    async def embed_one(request: Request) -> ASGIApp:
        body = parse_embedding(read_json(None, await request.body()), OllamaEmbeddingsBody, state.context)
        _note_keep_alive(body.keep_alive, state)
        return _answered(await embed_prompt(body, request, state))

    about = Docs("Ollama", "Embed texts.", (OllamaEmbedBody,), {"model": "default", "input": ["a"]}, error=PLAIN_ERROR)
    older = about._replace(
        summary="Embed a text.", bodies=(OllamaEmbeddingsBody,), example={"model": "default", "prompt": "a"}
    )
    return [
        _entry("/api/embed", embed_texts, about, any_model=True),
        _entry("/api/embeddings", embed_one, older, any_model=True),
    ]


def _answered(content: dict[str, Any]) -> Response:
    return Response(_json.encode(content | ignored.answer_field()), media_type="application/json")


def _entry(
    path: str, endpoint: Callable[..., Any], docs: Docs, method: str = "POST", *, any_model: bool = False
) -> Entry:
    return Entry(
        path, endpoint, access="user", methods=[method], any_model=any_model, render_error=error_response, docs=docs
    )


def _docs(summary: str, body: type[msgspec.Struct], example: dict[str, Any]) -> Docs:
    return Docs("Ollama", summary, (body,), example, stream=NDJSON, error=PLAIN_ERROR)


def _fact_routes(state: ServerState) -> list[Entry]:
    started = _now()

    async def tags(_: Request) -> Response:
        return JSONResponse({"models": [card for _, cards in _cards(state, started) for card in cards]})

    async def ps(_: Request) -> Response:
        running = [
            running_card(cards[0], own) | {"expires_at": FAR} for own, cards in _cards(state, started, is_loaded=True)
        ]
        return JSONResponse({"models": running})

    async def show(request: Request) -> Response:
        payload = read_json(None, await request.body())
        body = convert(offered(payload, OllamaShowBody.__struct_fields__, TABLES["body"]), OllamaShowBody)
        model = body.name if body.model is None else body.model
        if model is None:
            raise InvalidRequest(
                'model is missing; send {"model": NAME}, with a name that /api/tags lists', field="model"
            )
        if body.name is not None:
            require_equal("name", body.name, "model", model)
        adapter_of(model, state)
        return JSONResponse(shown(model, started, state))

    async def version(_: Request) -> Response:
        return JSONResponse({"version": API_VERSION})

    async def root(_: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    about = Docs("Ollama", "The models.", error=PLAIN_ERROR)
    of_show = about._replace(summary="Describe a model.", bodies=(OllamaShowBody,), example={"model": "default"})
    show_entry = _entry("/api/show", show, of_show, any_model=True)
    show_entry.needs_engine = False
    there = about._replace(summary="Whether the server is running.", answer="text/plain")

    return [
        _entry("/", root, there, "GET"),
        _entry("/api/tags", tags, about, "GET"),
        _entry("/api/ps", ps, about._replace(summary="The models that are loaded."), "GET"),
        show_entry,
        _entry("/api/version", version, about._replace(summary="The version of Ollama's API."), "GET"),
    ]


def error_object(error: TureenError) -> dict[str, Any]:
    """Returns an error in Ollama's JSON form."""
    return {"error": error.message}


def error_response(error: TureenError) -> Response:
    """Returns an error as an answer with Ollama's body."""
    return error_answer(error, error_object(error))


def _note_keep_alive(duration: float | str | None, state: ServerState) -> None:
    """Does what `keep_alive: 0` asks for: the model is unloaded after the answer, where there are several."""
    if not asks_to_unload(duration):
        return
    if state.common.models is None:
        ignored.tell("keep_alive", "0 asks to unload the model, but the server's only model always stays")
    else:
        state.common.models.retire(state)


def _cards(
    state: ServerState, started: str, *, is_loaded: bool = False
) -> list[tuple[ServerState, list[dict[str, Any]]]]:
    """Returns the state and the entries of each model: its own, then those of its adapters. A model that was never
    loaded has the default one's state. `is_loaded`: of loaded models only."""
    if state.common.models is None:
        return [
            (state, [model_card(name, started, state) for name in (state.context.info.model_name, *state.adapters)])
        ]
    cards = []
    for member in state.common.models.members:
        if is_loaded and member.standing != "loaded":
            continue
        names, own = (member.name, *member.adapters), member.state
        known = [named_card(name, started, name) if own is None else model_card(name, started, own) for name in names]
        cards.append((own or state, known))
    return cards


async def _raw_plan(body: OllamaGenerateBody, payload: dict[str, Any], state: ServerState, owner: str) -> Plan:
    """Makes the request of a prompt with `raw: true`, to which no chat template is applied. Raises InvalidRequest,
    NotFound."""
    for name in ("system", "images", "think"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} cannot go with raw: true; it needs the model's template", field=name)
    state.check_accepting()
    context = state.context
    sampling = planning.make_sampling(sampling_of(body, payload), context, NAMES, DEFAULTS, as_recommended=True)
    [ids] = await tokenize([body.prompt], ["prompt"], context)
    options = Options(
        adapter=adapter_of(body.model, state),
        logprobs=body.logprob_spec,
        return_effective=body.return_effective,
        explain=body.options.explain,
    )
    draft = one_prompt(Prompt(ids), "prompt", sampling, options, owner=owner)
    return plan_of(draft, state)


async def _respond(request: Request, state: ServerState, plan: Plan, answer: OllamaAnswer) -> ASGIApp:
    if answer.is_streamed:
        lines = _lines(plan, state, answer)
        return await streamed(request, lines, lambda error: _line(error_object(error)), {"content-type": NDJSON})
    return Response(
        _json.encode(await unless_gone(request, _whole(plan, state, answer))), media_type="application/json"
    )


async def _whole(plan: Plan, state: ServerState, answer: OllamaAnswer) -> dict[str, Any]:
    pieces: list[Piece] = []
    last: dict[str, Any] = {}
    async with contextlib.aclosing(events_of(plan, state, WHOLE_INTERVAL)) as events:
        async for event in events:
            pieces += answer.catch_up(event.output, event.parts)
            if event.output.finish is not None:
                last = answer.ending(event.output) | answer.new_logprobs(event.output, state.context)
                last |= Explained(state.context).new(event.output)
    return answer.rendered(join_pieces(pieces)) | last


async def _lines(plan: Plan, state: ServerState, answer: OllamaAnswer) -> AsyncGenerator[bytes, None]:
    explained = Explained(state.context)
    async with contextlib.aclosing(events_of(plan, state)) as events:
        async for event in events:
            output = event.output
            for piece in answer.catch_up(output, event.parts):
                new = answer.new_logprobs(output, state.context) | explained.new(output)
                yield _line(answer.rendered(piece) | {"done": False} | new)
            if output.finish is not None:
                new = answer.new_logprobs(output, state.context) | explained.new(output)
                yield _line(answer.rendered(Piece()) | answer.ending(output) | new)


def _line(value: dict[str, Any]) -> bytes:
    return _json.encode(value) + b"\n"


class Piece(msgspec.Struct):
    """The part of an answer that one line of the stream carries."""

    text: str = ""
    thinking: str = ""
    calls: tuple[dict[str, Any], ...] = ()


def join_pieces(pieces: list[Piece]) -> Piece:
    """Joins all pieces of an answer."""
    return Piece(
        "".join(piece.text for piece in pieces),
        "".join(piece.thinking for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
    )


class OllamaAnswer:
    """Renders one answer while it grows. Ollama's lines have whole tool calls, so a call waits until it is complete."""

    def __init__(self, body: OllamaBody, kind: str) -> None:
        self.is_streamed = body.stream
        self._head = {"model": body.model}
        self._kind = kind
        self._call: tuple[int, str, str] | None = None  # index, name and arguments so far
        self._first_s: float | None = None  # seconds from the request to the first update
        self._load_s = current_work().load_wait_s
        self._num_tokens = 0  # whose log-probabilities were sent

    def catch_up(self, output: Output, parts: list[Part]) -> list[Piece]:
        """Returns what the new parts add to the answer. Raises RequestFailed for an output that was aborted."""
        check_complete(output)
        if self._first_s is None:
            self._first_s = output.elapsed_s
        pieces: list[Piece] = []
        for part in parts:
            match part:
                case Content(text):
                    pieces.append(Piece(text=text))
                case Reasoning(text):
                    pieces.append(Piece(thinking=text))
                case CallStart(index, name):
                    pieces += self._completed()
                    self._call = (index, name, "")
                case CallArguments(_, text) if self._call is not None:
                    index, name, arguments = self._call
                    self._call = (index, name, arguments + text)
        return pieces + (self._completed() if output.finish is not None else [])

    def _completed(self) -> list[Piece]:
        if self._call is None:
            return []
        (index, name, arguments), self._call = self._call, None
        function = {"index": index, "name": name, "arguments": arguments_of(arguments)}
        return [Piece(calls=({"id": call_id(), "function": function},))]

    def new_logprobs(self, output: Output, context: Context) -> dict[str, Any]:
        """Returns the field with the log-probabilities of the tokens since the last call; {} without."""
        positions = output.output_logprobs[self._num_tokens : len(output.token_ids)]
        self._num_tokens = len(output.token_ids)
        if output.request.logprobs is None or not positions:
            return {}
        return {"logprobs": [_of_position(position, context) for position in positions]}

    def rendered(self, piece: Piece) -> dict[str, Any]:
        """Returns a line with a piece, without its `done`."""
        thinking = {"thinking": piece.thinking} if piece.thinking else {}
        head = self._head | {"created_at": _now()}
        if self._kind == "generate":
            return head | {"response": piece.text, **thinking}
        calls = {"tool_calls": piece.calls} if piece.calls else {}
        return head | {"message": {"role": "assistant", "content": piece.text, **thinking, **calls}}

    def ending(self, output: Output) -> dict[str, Any]:
        """Returns the fields of the last line: finish reason, token counts, and durations in nanoseconds. The
        load is the time that the request waited for its model; the first token ends the time of the prompt."""
        finish = "stop" if output.finish is None else output.finish.type
        first_s = max(self._first_s or 0.0, self._load_s)
        return {
            "done": True,
            "done_reason": finish,
            **output.ending_notes,
            "total_duration": round(output.elapsed_s * NS),
            "load_duration": round(self._load_s * NS),
            "prompt_eval_count": output.usage.prompt_tokens,
            "prompt_eval_duration": round((first_s - self._load_s) * NS),
            "eval_count": len(output.token_ids),
            "eval_duration": round(max(output.elapsed_s - first_s, 0) * NS),
            **ignored.answer_field(),
        }


def _of_position(position: PositionLogprobs, context: Context) -> dict[str, Any]:
    best = [_of_token(entry, context) for entry in position.top or () if entry[0] is not None]
    return _of_token(position.token, context) | ({"top_logprobs": best} if best else {})


def _of_token(logprob: TokenLogprob, context: Context) -> dict[str, Any]:
    value, token_id = logprob
    token = context.tokenizer.token_bytes(token_id)
    text = context.tokenizer.token_text(token_id)
    return {"token": text, "logprob": LEAST_LOGPROB if value is None else value, "bytes": list(token)}


def _loaded(body: OllamaBody, kind: str) -> dict[str, Any]:
    reason = "unload" if asks_to_unload(body.keep_alive) else "load"
    return OllamaAnswer(body, kind).rendered(Piece()) | {"done": True, "done_reason": reason} | ignored.answer_field()


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
