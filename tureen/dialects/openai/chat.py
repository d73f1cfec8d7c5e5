"""Serves OpenAI's `/v1/chat/completions`.

Source: https://platform.openai.com/docs/api-reference/chat
"""

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
from tureen.dialects.openai import token_fields
from tureen.dialects.openai.answer import Answer, StreamUsage
from tureen.dialects.openai.body import budget_of
from tureen.dialects.openai.chat_body import ChatBody
from tureen.dialects.openai.token_fields import ChoiceTokens, TokenNames
from tureen.fields.tools import call_id
from tureen.http.chat_answer import ChatRun, prepare_chat, run_of
from tureen.http.dialect import Docs, Entry, read_body_with, unless_gone
from tureen.requests.chat import Chat
from tureen.requests.drafts import Plan
from tureen.requests.generation import WHOLE_INTERVAL, Output, OutputEvent
from tureen.requests.offload import offload
from tureen.requests.output_parser import join_parts
from tureen.requests.state import Context, ServerState
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning


def routes(state: ServerState) -> list[Entry]:
    """Returns the route of this API."""

    async def chat_completions(request: Request) -> ASGIApp:
        return await _respond(request, state)

    docs = Docs(
        "OpenAI",
        "Answer a chat.",
        bodies=(ChatBody,),
        example={"messages": [{"role": "user", "content": "What is the capital of Japan?"}], "max_tokens": 16},
        stream="text/event-stream",
    )
    return [Entry("/v1/chat/completions", chat_completions, access="user", methods=["POST"], docs=docs)]


async def _respond(request: Request, state: ServerState) -> ASGIApp:
    def read(payload: dict[str, Any]) -> tuple[ChatBody, str, Chat]:
        body = openai_chat_fields.parse(payload)
        name = openai_answer.name_of(body, "chatcmpl-")
        return body, name, openai_chat_fields.chat_of(body, payload, name, state)

    context = state.context
    body, name, chat = await read_body_with(request, read)
    plan = await prepare_chat(chat, request, state)
    token_fields.check_plan(body, plan, "top_logprobs", body.top_logprobs)
    run = run_of(plan, state, budget_of(body.thinking_token_budget, state))
    choices = [GrowingChoice(output, body, plan, context) for output in run.outputs]
    if body.stream:
        head = openai_answer.head(name, "chat.completion.chunk", body, context)
        return await openai_answer.open_stream(request, _chunks(run, choices, body, head, plan, context))
    await unless_gone(request, _collect(run, choices))
    size = sum(output.num_logprobs + len(output.text) for output in run.outputs)
    answer = openai_answer.head(name, "chat.completion", body, context) | {
        "choices": await offload.run_each(size, GrowingChoice.whole, choices),
        "usage": openai_answer.usage(run.outputs, len(run.outputs), _num_reasoning(choices)),
        **token_fields.of_answer(run.outputs[0], body, context),
        **token_fields.extension(run.outputs[0], body),
        **token_fields.timings_of(run.outputs[0], body),
        **openai_answer.metadata(body, context, **plan.reading.notes),
    }
    return Response(openai_answer.encode(answer), media_type="application/json")


class GrowingChoice:
    """Builds one choice of an answer, whole or chunk by chunk, with its log-probabilities and reasoning tokens."""

    def __init__(self, output: Output, body: ChatBody, plan: Plan, context: Context) -> None:
        self.output = output
        self._body = body
        self._tokens = ChoiceTokens(output, body, context)
        self.progress = self._tokens.progress
        self._names = TokenNames(body, context)
        self.num_reasoning = 0  # known at the end
        self._reading = plan.reading
        self._custom = plan.reading.custom_tools
        self._custom_calls = set[int]()  # indices of the calls of custom tools that were sent
        self._tokenizer = context.tokenizer
        # as DeepSeek's and SGLang's deltas have it, whose clients read the field of every delta
        self._no_reasoning = {} if plan.reading.reasoning is None else {"reasoning_content": None}
        self._parts: list[Part] = []
        self._reasoning = ""  # of a stream, not sent yet
        self._finish_reason: str | None = None
        self._num_tokens = 0  # tokens whose log-probabilities were sent

    def add(self, event: OutputEvent) -> None:
        """Adds the new parts of the output."""
        self._parts += event.parts
        self._finish_reason = event.reader.finish_reason(event.output)

    def end(self) -> None:
        """Counts the reasoning tokens once the output has ended."""
        whole = join_parts(self._parts)
        self.num_reasoning = self._reading.num_reasoning_tokens(self.output, whole, self._tokenizer)

    def whole(self) -> Answer:
        """Returns the choice of an answer that is not streamed."""
        self.end()
        answer = join_parts(self._parts)
        message: Answer = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        message["refusal"] = None
        reasoning = (answer.reasoning if self._body.include_reasoning else "") or None
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        message["tool_calls"] = [self._call(name, text) for name, text in answer.calls] or None
        return {"index": self.output.index, "message": message} | self._rest() | self._tokens.first()

    def _call(self, name: str, text: str) -> Answer:
        if name in self._custom:
            return {"id": call_id(), "type": "custom", "custom": {"name": name, "input": text}}
        return {"id": call_id(), "type": "function", "function": {"name": name, "arguments": text}}

    def sendable(self, parts: Sequence[Part], *, has_ended: bool) -> list[Part]:
        """Returns the parts that a stream sends now: reasoning is kept until it is complete, if the body wants it in
        one piece."""
        if not self._body.include_reasoning:
            return [part for part in parts if not isinstance(part, Reasoning)]
        if self._body.stream_reasoning:
            return list(parts)
        sent: list[Part] = []
        for part in parts:
            if isinstance(part, Reasoning):
                self._reasoning += part.text
            else:
                sent += [*self._take_reasoning(), part]
        return sent + (self._take_reasoning() if has_ended else [])

    def _take_reasoning(self) -> list[Part]:
        reasoning, self._reasoning = self._reasoning, ""
        return [Reasoning(reasoning)] if reasoning else []

    def delta(self, part: Part) -> Answer:
        """Returns the `delta` of a chunk for a part."""
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallStart(index, name):
                if name in self._custom:
                    self._custom_calls.add(index)
                return {"tool_calls": [{"index": index} | self._call(name, "")]}
            case CallArguments(index, text):
                more = {"custom": {"input": text}} if index in self._custom_calls else {"function": {"arguments": text}}
                return {"tool_calls": [{"index": index, **more}]}

    def first_chunk(self) -> Answer:
        """Returns the choice of the chunk before all others, which tells the role."""
        role = {"role": "assistant", "content": "", "refusal": None} | self._no_reasoning
        choice = {"index": self.output.index, "delta": role, "logprobs": None, "finish_reason": None}
        return choice | self._tokens.first()

    def chunk(self, delta: Answer, *, is_last: bool = False) -> Answer:
        """Returns the choice of a chunk. Log-probabilities are in the first chunk after their token."""
        choice: Answer = {"index": self.output.index, "delta": self._no_reasoning | delta}
        if is_last:
            return choice | self._rest()
        return choice | {"logprobs": self._logprobs(), "finish_reason": None} | self._tokens.so_far()

    def _rest(self) -> Answer:
        rest = {"logprobs": self._logprobs(), "finish_reason": self._finish_reason}
        return rest | openai_answer.ending(self.output) | self._tokens.so_far() | self._tokens.at_end()

    def _logprobs(self) -> Answer | None:
        output = self.output
        if not (self._body.logprobs or self._body.logprob_token_ids):
            return None
        count = self._body.top_logprobs
        content = [
            self._token(position.token)
            | {"top_logprobs": list(map(self._token, token_fields.alternatives(position, count)))}
            for position in output.output_logprobs[self._num_tokens : len(output.token_ids)]
        ]
        self._num_tokens = len(output.token_ids)
        return {"content": content, "refusal": None}

    def _token(self, logprob: TokenLogprob) -> Answer:
        value, token_id = logprob
        return {
            "token": self._names.name(token_id),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
            "logprob": value,
        }


async def _collect(run: ChatRun, choices: Sequence[GrowingChoice]) -> None:
    """Runs the requests to their ends and adds all parts to the choices."""
    async with contextlib.aclosing(run.events(WHOLE_INTERVAL)) as events:
        async for event in events:
            choices[event.output.index].add(event)


async def _chunks(
    run: ChatRun, choices: Sequence[GrowingChoice], body: ChatBody, head: Answer, plan: Plan, context: Context
) -> AsyncGenerator[Answer, None]:
    """Yields the chunks of a stream: for each choice first its role, then its content, then its finish reason."""
    usage = StreamUsage(body, run.outputs, len(run.outputs))
    begun, ended = set[int](), set[int]()

    def chunk(choice: Answer) -> Answer:
        times = token_fields.timings_of(run.outputs[choice["index"]], body)
        return head | {"choices": [choice]} | usage.so_far(_num_reasoning(choices)) | times

    async with contextlib.aclosing(run.events()) as events:
        async for event in events:
            output = event.output
            choice = choices[output.index]
            if output.index in ended:
                continue
            choice.add(event)
            if output.finish is not None:  # read before all yields: outputs grow while chunks wait to be sent
                ended.add(output.index)
                choice.end()
            progress = choice.progress.new()
            if output.index not in begun or progress:
                opening = choice.chunk({}) if output.index in begun else choice.first_chunk()
                about_prompt = {} if begun else token_fields.of_answer(output, body, context)
                begun.add(output.index)
                yield chunk(opening) | about_prompt | progress
            for part in choice.sendable(event.parts, has_ended=output.index in ended):
                yield chunk(choice.chunk(choice.delta(part)))
            if output.index in ended:
                notes = openai_answer.metadata(body, context, **plan.reading.notes)
                yield chunk(choice.chunk({}, is_last=True)) | notes
    if more := token_fields.extension(run.outputs[0], body):
        yield head | {"choices": []} | more
    if usage.at_end:
        yield head | usage.whole(_num_reasoning(choices))


def _num_reasoning(choices: Sequence[GrowingChoice]) -> int:
    return sum(choice.num_reasoning for choice in choices)
