"""OpenAI's `/v1/chat/completions`. Reference: OpenAI's API reference, "Chat Completions"."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.types import TokenLogprob
from tureen.dialects.openai import answer as openai_answer
from tureen.dialects.openai import chat_body as openai_chat_fields
from tureen.dialects.openai.answer import Answer, Counting, token_text
from tureen.dialects.openai.chat_body import ChatBody
from tureen.http.chat_answer import planned
from tureen.http.dialect import Docs, Entry, read_with, unless_gone
from tureen.requests.chat import Chat
from tureen.requests.drafts import Plan
from tureen.requests.generation import WHOLE_INTERVAL, Output, OutputEvent, Run
from tureen.requests.offload import offload
from tureen.requests.reading import joined
from tureen.requests.state import Context, ServerState
from tureen.requests.tool_fields import call_id
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning
from tureen.text.tokenizer import Tokenizer


def routes(state: ServerState) -> list[Entry]:
    async def chat_completions(request: Request) -> ASGIApp:
        return await _respond(request, state)

    docs = Docs(
        "OpenAI",
        "Answer a chat.",
        bodies=(ChatBody,),
        example={"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16},
        stream="text/event-stream",
    )
    return [Entry("/v1/chat/completions", chat_completions, access="user", methods=["POST"], docs=docs)]


async def _respond(request: Request, state: ServerState) -> ASGIApp:
    def read(given: dict[str, Any]) -> tuple[ChatBody, str, Chat]:
        body = openai_chat_fields.parse(given)
        name = openai_answer.name_of(body, "chatcmpl")
        return body, name, openai_chat_fields.chat_of(body, given, name, state)

    context = state.context
    body, name, chat = await read_with(request, read)
    plan = await planned(chat, request, state)
    run = Run(state, plan)
    choices = [GrowingChoice(output, plan, context) for output in run.outputs]
    if body.stream:
        head = openai_answer.head(name, "chat.completion.chunk", body, context)
        return await openai_answer.open_stream(request, _chunks(run, choices, body, head, plan, context))
    await unless_gone(request, _collect(run, choices))
    size = sum(output.num_logprobs + len(output.text) for output in run.outputs)
    answer = openai_answer.head(name, "chat.completion", body, context) | {
        "choices": await offload.run_each(size, GrowingChoice.whole, choices),
        "usage": openai_answer.usage(run.outputs, len(run.outputs), sum(one.num_reasoning for one in choices)),
        **openai_answer.metadata(body, context, **plan.reading.notes),
    }
    return Response(openai_answer.encode(answer), media_type="application/json")


class GrowingChoice:
    """A choice as it grows, and what is counted and shown of its tokens."""

    def __init__(self, output: Output, plan: Plan, context: Context) -> None:
        self.output = output
        self.num_reasoning = 0  # known at the end
        self._reading = plan.reading
        self._custom = plan.reading.custom_tools
        self._custom_calls = set[int]()  # of those that a stream has told, by their places
        self._tokenizer = context.tokenizer
        self._parts: list[Part] = []
        self._finish_reason: str | None = None
        self._num_tokens = 0  # whose log-probabilities were told

    def add(self, event: OutputEvent) -> None:
        """More of it has come."""
        self._parts += event.parts
        self._finish_reason = event.reader.finish_reason(event.output)

    def end(self) -> None:
        """All of it has come."""
        whole = joined(self._parts)
        self.num_reasoning = self._reading.num_reasoning_tokens(self.output, whole, self._tokenizer)

    def whole(self) -> Answer:
        """The choice of an answer that is no stream."""
        self.end()
        answer = joined(self._parts)
        message: Answer = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        message["refusal"] = None
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [self._call(name, text) for name, text in answer.calls]
        return {"index": self.output.index, "message": message} | self._rest()

    def _call(self, name: str, text: str) -> Answer:
        if name in self._custom:
            return {"id": call_id(), "type": "custom", "custom": {"name": name, "input": text}}
        return {"id": call_id(), "type": "function", "function": {"name": name, "arguments": text}}

    def delta(self, part: Part) -> Answer:
        """Returns what a chunk says of a part."""
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallStart(index, name):
                if name in self._custom:
                    self._custom_calls.add(index)
                return {"tool_calls": [{"index": index} | self._call(name, "")]}
            case CallArguments(index, text):
                more = {"custom": {"input": text}} if index in self._custom_calls else {"function": {"arguments": text}}
                return {"tool_calls": [{"index": index, **more}]}

    def chunk(self, delta: Answer, *, is_last: bool = False) -> Answer:
        """The choice of a chunk; the first one that comes after a token has its log-probabilities."""
        choice: Answer = {"index": self.output.index, "delta": delta}
        return choice | (self._rest() if is_last else {"logprobs": self._logprobs(), "finish_reason": None})

    def _rest(self) -> Answer:
        return {"logprobs": self._logprobs(), "finish_reason": self._finish_reason} | openai_answer.ending(self.output)

    def _logprobs(self) -> Answer | None:
        output = self.output
        if output.request.logprobs is None:
            return None
        found = [
            _token(position.token, self._tokenizer)
            | {"top_logprobs": [_token(one, self._tokenizer) for one in position.top or ()]}
            for position in output.output_logprobs[self._num_tokens : len(output.token_ids)]
        ]
        self._num_tokens = len(output.token_ids)
        return {"content": found, "refusal": None}


def _token(logprob: TokenLogprob, tokenizer: Tokenizer) -> Answer:
    value, token_id = logprob
    return {
        "token": token_text(tokenizer, token_id),
        "bytes": list(tokenizer.token_bytes(token_id)),
        "logprob": value,
    }


async def _collect(run: Run, choices: Sequence[GrowingChoice]) -> None:
    """All of the choices, once they have ended."""
    async with contextlib.aclosing(run.events(WHOLE_INTERVAL)) as events:
        async for event in events:
            choices[event.output.index].add(event)


async def _chunks(
    run: Run, choices: Sequence[GrowingChoice], body: ChatBody, head: Answer, plan: Plan, context: Context
) -> AsyncGenerator[Answer, None]:
    """Of each choice first its role, then what it says, then why it ended."""
    counting = Counting(body, run.outputs, len(run.outputs))
    begun, ended = set[int](), set[int]()

    def chunk(choice: Answer) -> Answer:
        return head | {"choices": [choice]} | counting.so_far(sum(one.num_reasoning for one in choices))

    async with contextlib.aclosing(run.events()) as events:
        async for event in events:
            output = event.output
            choice = choices[output.index]
            if output.index in ended:
                continue
            if output.index not in begun:
                begun.add(output.index)
                role = {"role": "assistant", "content": "", "refusal": None}
                yield chunk({"index": output.index, "delta": role, "logprobs": None, "finish_reason": None})
            choice.add(event)
            if output.finish is not None:  # asked now: outputs grow while chunks wait to be sent
                ended.add(output.index)
                choice.end()
            for part in event.parts:
                yield chunk(choice.chunk(choice.delta(part)))
            if output.index in ended:
                notes = openai_answer.metadata(body, context, **plan.reading.notes)
                yield chunk(choice.chunk({}, is_last=True)) | notes
    if counting.at_end:
        yield head | counting.whole(sum(one.num_reasoning for one in choices))
