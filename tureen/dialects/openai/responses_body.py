"""Declares the body of OpenAI's `/v1/responses` and converts it to a chat.

Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tureen.contract.params import JsonObject
from tureen.dialects.openai import body as openai_fields
from tureen.dialects.openai import token_fields
from tureen.dialects.openai.body import IncludeReasoning, Label, Thinking, ThinkingBudget, TokenLimit, TopLogprobs
from tureen.dialects.openai.responses_input import ResponsesItem, conversation_of, read_items
from tureen.dialects.openai.responses_tools import ResponsesTool, chosen_tools, namespaces_of, read_tool_types, tools_of
from tureen.dialects.openai.token_fields import TokenBody
from tureen.errors import InvalidRequest
from tureen.fields import ignored
from tureen.fields.tools import MAX_TOOLS
from tureen.requests.chat import Chat
from tureen.requests.drafts import salt_of
from tureen.requests.planning import Names
from tureen.requests.state import ServerState
from tureen.requests.thinking_field import effort_kwargs
from tureen.text.messages import MAX_MESSAGES, Tool

TABLE = openai_fields.table_of("responses")


LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
MAX_INCLUDED = 64

Included = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""Names that `include` may have. All but two are about tools that only other servers run, or are always there."""


class ResponsesTextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer's text. `strict`: what of a schema cannot be enforced is refused."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class ResponsesText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `text`."""

    format: ResponsesTextFormat | None = None


class ConversationReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation, by its id."""

    id: str


class ResponsesReasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesBody(TokenBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/responses`."""

    input: Annotated[
        str | Annotated[list[ResponsesItem], Meta(max_length=MAX_MESSAGES)],
        Meta(
            description="The conversation so far: a text of the user, or items. A message's type may be left out. The "
            "model reads items of other servers' tools, such as web_search_call, as calls with their results."
        ),
    ]
    instructions: Annotated[str | None, Meta(description="System message.")] = None
    max_output_tokens: Annotated[
        TokenLimit | None,
        Meta(description="Most tokens to generate; -1 = up to the context end, which is the default."),
    ] = None
    tools: Annotated[
        Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None,
        Meta(
            description="Functions and custom tools that the client runs, single or in namespaces; others are left out."
        ),
    ] = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | JsonObject | None,
        Meta(description="Whether tools are called: a mode, a function, or `allowed_tools`."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: one call at most.")] = True
    text: Annotated[ResponsesText | None, Meta(description="`format`: text, JSON, or JSON of a schema.")] = None
    reasoning: Annotated[
        ResponsesReasoning | None,
        Meta(description="`effort`: for chat templates that know it; none also turns enable_thinking off."),
    ] = None
    store: Annotated[bool | None, Meta(description="Keep the response. Default: true with --responses-store.")] = None
    previous_response_id: Annotated[
        str | None, Meta(description="The kept response to continue, with everything before it.")
    ] = None
    conversation: Annotated[
        str | ConversationReference | None,
        Meta(description="A conversation to continue; input and output are appended to it."),
    ] = None
    background: Annotated[
        bool, Meta(description="Answer immediately and generate in the background; GET the response later.")
    ] = False
    truncation: Annotated[
        Literal["auto", "disabled"],
        Meta(description="auto: a conversation that does not fit loses its oldest turns, which are reported."),
    ] = "disabled"
    top_logprobs: Annotated[
        TopLogprobs | None, Meta(description="Most likely tokens at each position of the text, with log-probabilities.")
    ] = None
    include: Annotated[
        Annotated[list[Included], Meta(max_length=MAX_INCLUDED)] | None,
        Meta(description="message.output_text.logprobs, reasoning.encrypted_content; the rest is always included."),
    ] = None
    thinking: Thinking = None
    thinking_token_budget: ThinkingBudget = None
    include_reasoning: IncludeReasoning = True
    safety_identifier: Annotated[Label | None, Meta(description="Name of the end user, returned in the answer.")] = None


def parse(payload: dict[str, Any]) -> ResponsesBody:
    """Checks a JSON body's form. Raises InvalidRequest."""
    if isinstance(payload.get("input"), list) and len(payload["input"]) <= MAX_MESSAGES:
        payload = payload | {"input": read_items(payload["input"])}
    if payload.get("tools") is not None:
        payload = payload | {"tools": read_tool_types(payload["tools"])}
    body = token_fields.with_probs(openai_fields.read(payload, ResponsesBody, TABLE), "top_logprobs")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        ignored.tell("stream_options.continuous_usage_stats", "the last event has the usage")
    if body.logprobs_mode != "processed" and not wants_logprobs(body):
        raise InvalidRequest(f"logprobs_mode needs top_logprobs, or include: [{LOGPROBS!r}]", field="logprobs_mode")
    token_fields.check(body, has_logprobs=wants_logprobs(body))
    if body.truncate_prompt_tokens is not None and body.truncation == "auto":
        raise InvalidRequest(
            "truncate_prompt_tokens cannot go with truncation: auto; send one", field="truncate_prompt_tokens"
        )
    return body


def wants_logprobs(body: ResponsesBody) -> bool:
    """Returns whether the text comes with log-probabilities."""
    return bool(body.top_logprobs or body.logprob_token_ids) or LOGPROBS in (body.include or ())


def chat_of(
    body: ResponsesBody, payload: Mapping[str, Any], name: str, state: ServerState, before: Sequence[Any] = ()
) -> tuple[Chat, Sequence[Sequence[str]]]:
    """Converts a body to a chat; returns also, for each of its messages, the items that it was made of.

    `payload`: the body as sent; `name`: the id of the answer; `before`: the kept items that it continues. Raises
    InvalidRequest, NotFound.
    """
    openai_fields.budget_of(body.thinking_token_budget, state)
    taken = {name: value for name, value in payload.items() if name not in TABLE.refused}
    fields, names = openai_fields.requested_sampling(taken, body, "max_output_tokens")
    if body.text is not None and body.text.format is not None:
        names = _add_schema(body.text.format, fields, names)
    tools, choice = chosen_tools(body.tool_choice, tools_of(body.tools), namespaces_of(body.tools))
    continued = "conversation" if body.previous_response_id is None else "previous_response_id"
    conversation = conversation_of(body.input, body.instructions, before, continued)
    if body.prompt_logprobs is not None and conversation.pictures:
        raise InvalidRequest(token_fields.NO_PICTURES, field="prompt_logprobs")
    chat = Chat(
        messages=tuple(conversation.messages),
        field="input",
        pictures=tuple(conversation.pictures),
        tools=tools,
        schema_field="tools[{}].parameters",
        grammar_field="tools[{}].format.definition",
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=_template_kwargs(body, tools, state),
        sampling=fields,
        names=names,
        adapter=openai_fields.adapter(body, state),
        priority=body.priority,
        cache_salt=salt_of(body.cache_salt, body.extra_key),
        max_prompt_tokens=token_fields.most_prompt_tokens(body, fields.get("max_new_tokens"), state.context),
        hidden_states="last" if body.return_hidden_states else "none",
        processor=openai_fields.processor(body, state),
        return_effective=body.return_effective,
        explain=body.explain,
        rid=name,
        deadline_ms=body.deadline_ms,
        ttft_deadline_ms=body.ttft_deadline_ms,
        log_metrics=body.log_metrics,
        logprobs=token_fields.logprob_spec(
            body, (body.top_logprobs or 0) if wants_logprobs(body) else None, state.context
        ),
    )
    return chat, conversation.sources


def _add_schema(text_format: ResponsesTextFormat, fields: dict[str, Any], names: Names) -> Names:
    """Adds the schema that the text must match to the sampling parameters, if there is one. Returns the body's names
    for these. Raises InvalidRequest."""
    field, schema = _schema(text_format)
    if schema is None:
        return names
    if "json_schema" in fields:
        raise InvalidRequest(f"{field} cannot go with {names.path('json_schema')}; send one", field=field)
    fields["json_schema"], renamed = schema, {**names.renamed, "json_schema": field}
    if text_format.strict is not None and text_format.type == "json_schema":
        fields["strict_schema"], renamed["strict_schema"] = text_format.strict, "text.format.strict"
    return Names("", renamed)


def _schema(text_format: ResponsesTextFormat) -> tuple[str, dict[str, Any] | None]:
    """Returns the field that asks for a schema, and the schema that the text must match; None = any text. Raises
    InvalidRequest."""
    field = "text.format.schema"
    if text_format.type != "json_schema":
        if text_format.schema is not None:
            raise InvalidRequest(f"{field} needs text.format.type json_schema", field=field)
        return "text.format", {"type": "object"} if text_format.type == "json_object" else None
    if text_format.schema is None:
        raise InvalidRequest(f"{field} is missing", field=field)
    return field, text_format.schema


def _template_kwargs(body: ResponsesBody, tools: Sequence[Tool], state: ServerState) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    level = {} if effort is None else dict(effort_kwargs(effort, "reasoning.effort", tools, state.context))
    switch = openai_fields.switch_kwargs(body.thinking, tools, state.context)
    for name, value in switch.items():
        if level.get(name, value) != value:
            raise InvalidRequest("thinking contradicts reasoning.effort; send one", field="thinking")
    return level | switch
