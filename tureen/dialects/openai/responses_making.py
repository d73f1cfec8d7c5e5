"""Makes one response of OpenAI's `/v1/responses` of the output of its request, whole or event by event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request

from tureen.dialects.openai import token_fields
from tureen.dialects.openai.body import budget_of
from tureen.dialects.openai.responses_body import ENCRYPTED, ResponsesBody, wants_logprobs
from tureen.dialects.openai.responses_logprobs import TextLogprobs
from tureen.dialects.openai.responses_output import CANCELLED, COMPLETED, INCOMPLETE, OutputItems, whole_event
from tureen.dialects.openai.responses_tools import namespaces_of
from tureen.dialects.openai.token_fields import ChoiceTokens
from tureen.http.chat_answer import events_of, run_to_end
from tureen.requests.drafts import Plan
from tureen.requests.generation import Output
from tureen.requests.output_parser import join_parts
from tureen.requests.state import ServerState
from tureen.requests.thinking_budget import ReasoningBudget
from tureen.text.messages import Part


class Making(NamedTuple):
    """A response that is to be made."""

    head: dict[str, Any]  # the response before any of its output is there
    plan: Plan
    body: ResponsesBody
    state: ServerState

    async def whole(self, request: Request) -> dict[str, Any]:
        """Runs the request to its end and returns the response. Raises ClientGone."""
        last = await run_to_end(self.plan, request, self.state, self._budget)
        items = self._items()
        items.read(last.output, last.parts)
        items.close(_status(last.output))
        return self._end(items, last.output, last.parts)

    @property
    def _budget(self) -> ReasoningBudget | None:
        return budget_of(self.body.thinking_token_budget, self.state)

    async def events(
        self, left: Callable[[dict[str, Any]], None] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Runs the request and yields the events of its stream. The last has the response as it ended.

        left: gets the response as far as it came, where the generator is closed between its first event and its last.
        """
        items, seen, output, has_ended = self._items(), list[Part](), None, False
        run = events_of(self.plan, self.state, budget=self._budget)
        try:
            async with contextlib.aclosing(run) as events:
                async for event in events:
                    beginning = self._beginning() if output is None else []
                    output = event.output
                    seen += event.parts
                    for item_event in [*beginning, *items.read(output, event.parts)]:
                        yield item_event
                    if output.finish is not None:
                        for item_event in items.close(_status(output)):
                            yield item_event
                        has_ended = True
                        yield whole_event(_status(output), self._end(items, output, seen))
        except (GeneratorExit, asyncio.CancelledError):
            if left is not None and output is not None and not has_ended:
                items.close(_status(output))
                response = self._end(items, output, seen)
                cancelled = {"status": CANCELLED, "incomplete_details": None}
                left(response | cancelled if output.finish is None else response)
            raise

    def _beginning(self) -> list[dict[str, Any]]:
        kinds = ("created", "queued", "in_progress") if self.body.background else BEGINNING
        return [
            whole_event(kind, self.head | {"status": "in_progress" if kind == "in_progress" else self.head["status"]})
            for kind in kinds
        ]

    def _items(self) -> OutputItems:
        body, context = self.body, self.state.context
        logprobs = TextLogprobs(body, context, body.top_logprobs or 0) if wants_logprobs(body) else None
        encrypts = ENCRYPTED in (self.body.include or ())
        namespaces = namespaces_of(self.body.tools)
        return OutputItems(
            self.plan.reading.custom_tools,
            namespaces,
            logprobs,
            encrypts=encrypts,
            shows_reasoning=body.include_reasoning,
        )

    def _end(self, items: OutputItems, output: Output, parts: Sequence[Part]) -> dict[str, Any]:
        """Returns the response as it ended."""
        status = _status(output)
        tokenizer = self.state.context.tokenizer
        num_reasoning = self.plan.reading.num_reasoning_tokens(output, join_parts(parts), tokenizer)
        return (
            self.head
            | {
                "status": status,
                "completed_at": int(time.time()) if status == COMPLETED else None,
                "incomplete_details": {"reason": _cut_by(output)} if status == INCOMPLETE else None,
                "output": items.output,
                "usage": _usage(output, num_reasoning),
            }
            | _notes(self.head, output)
            | self._token_fields(output)
        )

    def _token_fields(self, output: Output) -> dict[str, Any]:
        """Returns what is asked for about tokens, in the forms that a choice of a chat has."""
        tokens, context = ChoiceTokens(output, self.body, self.state.context), self.state.context
        about_output = tokens.first() | tokens.so_far()
        if output.finish is not None:
            about_output |= tokens.at_end() | token_fields.extension(output, self.body)
            about_output |= token_fields.timings_of(output, self.body)
        return token_fields.of_answer(output, self.body, context) | about_output


BEGINNING = ("created", "in_progress")


def _status(output: Output) -> str:
    return COMPLETED if output.finish is not None and output.finish.type == "stop" else INCOMPLETE


def _cut_by(output: Output) -> str | None:
    """Returns why an output is incomplete: OpenAI's reason, or ours for an aborted one, such as a deadline."""
    if output.finish is not None and output.finish.type == "abort":
        return output.finish.reason
    return "max_output_tokens"


def _notes(head: dict[str, Any], output: Output) -> dict[str, Any]:
    """Says in the metadata, whose values are strings, what became of the constraint; beside it, how the output was
    sampled, where the body asks for that."""
    notes = output.constraint_notes
    effective = {} if output.remarks.effective is None else {"effective": output.remarks.effective}
    if not notes:
        return effective
    unenforced = {"unenforced": ", ".join(notes["unenforced"])} if "unenforced" in notes else {}
    flags = {name: "true" if notes[name] else "false" for name in ("valid", "closed_early") if name in notes}
    return {"metadata": head["metadata"] | unenforced | flags, **effective}


def _usage(output: Output, num_reasoning: int) -> dict[str, Any]:
    num_prompt, num_output = output.usage.prompt_tokens, len(output.token_ids)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": output.usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_output,
    }
