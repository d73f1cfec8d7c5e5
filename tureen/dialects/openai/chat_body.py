"""Declares the body of OpenAI's `/v1/chat/completions` and converts it to a chat.

Source: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from tureen.contract.params import JsonObject
from tureen.dialects.openai import body as openai_fields
from tureen.dialects.openai import token_fields
from tureen.dialects.openai.body import IncludeReasoning, Thinking, ThinkingBudget, ThinkingSwitch, TokenLimit, TopOrAll
from tureen.dialects.openai.token_fields import ReturnProgress, TokenBody
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.body import require_equal
from tureen.fields.shared import TokenIds
from tureen.fields.tools import Tools, chosen_tools, read_arguments, read_tools
from tureen.media.base import Modality
from tureen.requests.chat import Chat
from tureen.requests.drafts import salt_of
from tureen.requests.media_fields import file_text
from tureen.requests.state import ServerState
from tureen.requests.thinking_field import effort_kwargs, known_kwargs
from tureen.text.messages import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, Message, Tool

TABLE = openai_fields.table_of("chat")


class MediaUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `image_url` and `video_url`."""

    url: Annotated[str, Meta(min_length=1, description="URL, `data:` URL, base64 or file name; see the media page.")]
    detail: Annotated[
        str | None, Meta(description="Pictures always have the model's full resolution; low is reported.")
    ] = None


class FilePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text file: the model reads its name and its text."""

    file_data: Annotated[str, Meta(description="The file in base64, as it is or as a `data:` URL.")]
    filename: Annotated[str | None, Meta(description="Its name.")] = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: Literal["text", "image_url", "video_url", "file", "refusal"]
    text: Annotated[str | None, Meta(description="With type text.")] = None
    file: Annotated[FilePart | None, Meta(description="With type file: a text file.")] = None
    refusal: Annotated[str | None, Meta(description="With type refusal, of the assistant: read as its text.")] = None
    image_url: Annotated[MediaUrl | str | None, Meta(description="With type image_url.")] = None
    video_url: Annotated[MediaUrl | str | None, Meta(description="With type video_url.")] = None
    modalities: Annotated[
        Modality | None,
        Meta(
            description="Of a picture: image or multi-images, the same for all; of a video: video. See the media page."
        ),
    ] = None


class CallFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function of a call, and its arguments."""

    name: Annotated[str, Meta(min_length=1, description="Name of the tool.")]
    arguments: Annotated[str | None, Meta(description="A JSON object, as text. Default: {}.")] = None


class CallCustom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A custom tool that was called, and its text."""

    name: Annotated[str, Meta(min_length=1, description="Name of the tool.")]
    input: Annotated[str, Meta(description="The text that it was called with.")]


class MessageCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that the assistant made."""

    id: Annotated[str, Meta(min_length=1, description="Id of the call, which the message with its result names.")]
    function: Annotated[CallFunction | None, Meta(description="With type function.")] = None
    custom: Annotated[CallCustom | None, Meta(description="With type custom.")] = None
    type: Literal["function", "custom"] = "function"
    index: Annotated[int | None, Meta(description="Index of the call, as in streams.")] = None


class MessageField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message. An answer's message can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None, Meta(description="A text, or parts.")
    ] = None
    name: Annotated[str | None, Meta(description="Name of the speaker, for chat templates that show it.")] = None
    reasoning_content: Annotated[str | None, Meta(description="The assistant's reasoning.")] = None
    reasoning: Annotated[str | None, Meta(description="vLLM's name of reasoning_content.")] = None
    tool_calls: Annotated[
        Annotated[list[MessageCall], Meta(max_length=MAX_CALLS)] | None, Meta(description="The assistant's tool calls.")
    ] = None
    tool_call_id: Annotated[str | None, Meta(description="Id of the call whose result this is.")] = None
    refusal: Annotated[str | None, Meta(description="The assistant's refusal, read as a text after its content.")] = (
        None
    )
    annotations: Annotated[
        Annotated[list[Any], Meta(max_length=0)] | None, Meta(description="Always absent in answers of this server.")
    ] = None
    audio: Annotated[
        JsonObject | None, Meta(description="Speech of another server, by its id; the model cannot hear it.")
    ] = None
    function_call: Annotated[
        CallFunction | None, Meta(description="Old form of tool_calls; a message of the role function has its result.")
    ] = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ReasoningField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `reasoning`."""

    effort: Annotated[Effort | None, Meta(description="Another name of reasoning_effort.")] = None


class TemplateBody(Protocol):
    """The fields of a body that set variables of the chat template."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def reasoning_effort(self) -> Effort | None: ...
    @property
    def reasoning(self) -> ReasoningField | None: ...
    @property
    def thinking(self) -> ThinkingSwitch | None: ...


class ChatBody(TokenBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/chat/completions`."""

    messages: Annotated[
        Annotated[list[MessageField], Meta(min_length=1, max_length=MAX_MESSAGES)] | None,
        Meta(description="The conversation so far."),
    ] = None
    input_ids: Annotated[
        TokenIds | None,
        Meta(description="Token ids of the prompt; messages are not rendered then, and need not be sent."),
    ] = None
    prompt_token_ids: Annotated[TokenIds | None, Meta(description="Another name of input_ids.")] = None
    max_completion_tokens: Annotated[
        TokenLimit | None,
        Meta(description="Most tokens to generate; -1 = up to the context end, which is the default."),
    ] = None
    max_tokens: Annotated[TokenLimit | None, Meta(description="Another name of max_completion_tokens.")] = None
    max_output_tokens: Annotated[TokenLimit | None, Meta(description="Another name of max_completion_tokens.")] = None
    max_new_tokens: Annotated[TokenLimit | None, Meta(description="Another name of max_completion_tokens.")] = None
    logprobs: Annotated[bool, Meta(description="Return log-probabilities of the output's tokens.")] = False
    top_logprobs: Annotated[
        TopOrAll | None,
        Meta(description="Best alternatives at each position, -1 = the whole vocabulary; needs logprobs: true."),
    ] = None
    tools: Annotated[Tools | None, Meta(description="Functions that the model may call; see the tools page.")] = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | JsonObject | None,
        Meta(description="Whether tools are called: auto, none, required; or an object: one tool, or `allowed_tools`."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: one call at most.")] = True
    reasoning_effort: Annotated[
        Effort | None, Meta(description="For chat templates that know it; none also turns enable_thinking off.")
    ] = None
    reasoning: Annotated[ReasoningField | None, Meta(description="Holds effort, as in /v1/responses.")] = None
    thinking: Thinking = None
    thinking_token_budget: ThinkingBudget = None
    chat_template_kwargs: Annotated[
        JsonObject | None, Meta(description='Variables of the chat template, such as {"enable_thinking": false}.')
    ] = None
    separate_reasoning: Annotated[
        bool, Meta(description="Reasoning comes as reasoning_content; false = it stays in the content.")
    ] = True
    include_reasoning: IncludeReasoning = True
    return_progress: ReturnProgress = False
    stream_reasoning: Annotated[
        bool, Meta(description="false: a stream has the reasoning in one piece, when it is complete.")
    ] = True
    continue_final_message: Annotated[bool, Meta(description="Continue the last message, the assistant's.")] = False
    add_generation_prompt: Annotated[
        bool | None,
        Meta(description="Begin a new message of the assistant. Default: unless the last is continued."),
    ] = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Meta(max_length=16)] | None, Meta(description="Kinds of output: text only.")
    ] = None


class ChatMessages(NamedTuple):
    """Messages as chat templates read them, and the references of their pictures and videos, in order."""

    messages: list[Message]
    pictures: list[str]
    videos: list[str]
    modalities: list[Modality]  # that pictures were sent with


def check_no_template(payload: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a chat template in a body."""
    for where, fields in (("", payload), ("chat_template_kwargs.", payload.get("chat_template_kwargs"))):
        if isinstance(fields, dict) and fields.get("chat_template") is not None:
            raise InvalidRequest(
                f"{where}chat_template is not available: {TABLE.refused['chat_template'][1]}",
                field=f"{where}chat_template",
                code="chat_template_not_allowed",
            )


def parse(payload: dict[str, Any]) -> ChatBody:
    """Checks a JSON body's form. Raises InvalidRequest."""
    check_no_template(payload)
    _check_audio(payload.get("messages"))
    body = token_fields.with_probs(openai_fields.read(payload, ChatBody, TABLE), "top_logprobs", logprobs=True)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    token_fields.check(body, has_logprobs=body.logprobs)
    if body.add_generation_prompt is body.continue_final_message:
        word = "true" if body.continue_final_message else "false"
        raise InvalidRequest(
            f"add_generation_prompt cannot be {word} if continue_final_message is {word}; leave it out",
            field="add_generation_prompt",
        )
    _check_prompt(body)
    if not (body.include_reasoning or body.separate_reasoning):
        raise InvalidRequest(
            "include_reasoning: false cannot go with separate_reasoning: false, which keeps the reasoning in the "
            "content; leave one out",
            field="include_reasoning",
        )
    return body


def _check_audio(messages: Any) -> None:
    """Raises InvalidRequest for messages with audio."""
    for index, message in enumerate(messages[:MAX_MESSAGES] if isinstance(messages, list) else ()):
        parts = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(parts[:MAX_PARTS] if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                openai_fields.refuse_audio(part.get("type"), f"messages[{index}].content[{number}]")


def _check_prompt(body: ChatBody) -> None:
    """Raises InvalidRequest unless there are messages or token ids; tells what has no effect beside the latter."""
    if body.input_ids is not None and body.prompt_token_ids is not None:
        require_equal("prompt_token_ids", body.prompt_token_ids, "input_ids", body.input_ids)
    field = "prompt_token_ids" if body.input_ids is None else "input_ids"
    if getattr(body, field) is None:
        if body.messages is None:
            raise InvalidRequest("messages is missing", field="messages")
        return
    if body.continue_final_message:
        raise InvalidRequest(f"{field} cannot go with continue_final_message; send one", field=field)
    for name in ("messages", "chat_template_kwargs", "reasoning_effort", "reasoning", "thinking"):
        if getattr(body, name) is not None:
            ignored.tell(name, f"{field} is the prompt")


def chat_of(body: ChatBody, payload: Mapping[str, Any], name: str, state: ServerState) -> Chat:
    """Converts a body to a chat. `payload`: the body as sent; `name`: the id of the answer. Raises InvalidRequest,
    NotFound."""
    tools, places, tool_choice = chosen_tools(body.tool_choice, read_tools(body.tools, custom=True))
    openai_fields.budget_of(body.thinking_token_budget, state)
    fields, names = openai_fields.requested_sampling(payload, body, "max_completion_tokens")
    prompt_ids = body.prompt_token_ids if body.input_ids is None else body.input_ids
    chat_messages = convert_messages((body.messages or ()) if prompt_ids is None else ())
    if body.prompt_logprobs is not None and (chat_messages.pictures or chat_messages.videos):
        raise InvalidRequest(token_fields.NO_PICTURES, field="prompt_logprobs")
    return Chat(
        field="messages" if prompt_ids is None else "prompt_token_ids" if body.input_ids is None else "input_ids",
        prompt_ids=prompt_ids,
        max_prompt_tokens=token_fields.most_prompt_tokens(body, fields.get("max_new_tokens"), state.context),
        messages=tuple(chat_messages.messages),
        pictures=tuple(chat_messages.pictures),
        videos=tuple(chat_messages.videos),
        modality=next(iter(chat_messages.modalities), None),
        tools=tools,
        tool_places=places,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        continue_final_message=body.continue_final_message,
        template_kwargs=template_kwargs(body, tools, state) if prompt_ids is None else {},
        separate_reasoning=body.separate_reasoning,
        sampling=fields,
        names=names,
        logprobs=token_fields.logprob_spec(body, (body.top_logprobs or 0) if body.logprobs else None, state.context),
        hidden_states="last" if body.return_hidden_states else "none",
        adapter=openai_fields.adapter(body, state),
        priority=body.priority,
        cache_salt=salt_of(body.cache_salt, body.extra_key),
        processor=openai_fields.processor(body, state),
        return_effective=body.return_effective,
        explain=body.explain,
        reports_progress=body.stream and body.return_progress,
        rid=name,
        deadline_ms=body.deadline_ms,
        ttft_deadline_ms=body.ttft_deadline_ms,
        log_metrics=body.log_metrics,
    )


def template_kwargs(body: TemplateBody, tools: Sequence[Tool], state: ServerState) -> dict[str, Any]:
    """Returns the variables that a body sets in the chat template. Raises InvalidRequest."""
    kwargs = known_kwargs(body.chat_template_kwargs or {}, "chat_template_kwargs", tools, state.context)
    nested = None if body.reasoning is None else body.reasoning.effort
    if body.reasoning_effort is not None and nested is not None:
        require_equal("reasoning.effort", nested, "reasoning_effort", body.reasoning_effort)
    field, level = ("reasoning_effort", body.reasoning_effort) if nested is None else ("reasoning.effort", nested)
    effort: Mapping[str, Any] = {} if level is None else effort_kwargs(level, field, tools, state.context)
    for name, value in effort.items():
        if kwargs.get(name) not in (None, value):
            sent = f"chat_template_kwargs.{name} {echo(kwargs[name])}"
            raise InvalidRequest(f"{field} {echo(level)} contradicts {sent}; send one", field=field)
    switch = openai_fields.switch_kwargs(body.thinking, tools, state.context)
    for name, value in switch.items():
        if {**kwargs, **effort}.get(name) not in (None, value):
            raise InvalidRequest(f"thinking contradicts another field that sets {name}; send one", field="thinking")
    return {**kwargs, **effort, **switch}


def convert_messages(messages: Sequence[MessageField]) -> ChatMessages:
    """Converts messages for chat templates. Raises InvalidRequest for a message that its role cannot have."""
    chat_messages = ChatMessages([], [], [], [])
    old_calls: dict[str, str] = {}  # name of a function in the old form -> id of its last call
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_role(message, where)
        message = _in_new_form(message, f"call{index:05d}", old_calls)
        converted: Message = {"role": "system" if message.role == "developer" else message.role}
        content = message.content
        if message.refusal and not isinstance(content, list):
            content = f"{content}\n{message.refusal}" if content else message.refusal
        converted["content"] = (
            _content(content, where, message.role, chat_messages) if isinstance(content, list) else content or ""
        )
        if message.tool_calls:
            converted["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
            ]
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        for name, value in (
            ("name", message.name), ("reasoning_content", reasoning), ("tool_call_id", message.tool_call_id)
        ):  # fmt: skip
            if value is not None:
                converted[name] = value
        chat_messages.messages.append(converted)
    return chat_messages


def _in_new_form(message: MessageField, call_id: str, old_calls: dict[str, str]) -> MessageField:
    """Returns a message with tool_calls instead of function_call, or the role tool instead of function.

    `call_id`: the id for a new call, which is added to `old_calls`.
    """
    if message.function_call is not None:
        old_calls[message.function_call.name] = call_id
        calls = [*(message.tool_calls or ()), MessageCall(id=call_id, function=message.function_call)]
        return msgspec.structs.replace(message, tool_calls=calls)
    if message.role == "function":
        return msgspec.structs.replace(message, role="tool", tool_call_id=old_calls.get(message.name or "", call_id))
    return message


def _check_role(message: MessageField, where: str) -> None:
    names = ("tool_calls", "function_call", "audio", "reasoning_content", "reasoning", "refusal")
    owners = dict.fromkeys(names, "assistant") | {"tool_call_id": "tool"}
    for name, role in owners.items():
        if getattr(message, name) and message.role != role:
            raise InvalidRequest(
                f"{where}.{name} belongs to a message of the role {role}, not {message.role}", field=f"{where}.{name}"
            )
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequest(
            f"{where}.tool_call_id is missing: it says which call this is the result of", field=f"{where}.tool_call_id"
        )
    if message.role == "function" and not message.name:
        raise InvalidRequest(
            f"{where}.name is missing: send the name of the function that this is the result of", field=f"{where}.name"
        )
    if message.audio:
        ignored.tell(f"{where}.audio", "the server keeps no audio, and the model cannot hear it")
    can_be_empty = message.tool_calls or message.function_call or message.refusal or message.audio
    if message.content is None and not can_be_empty and message.role != "function":
        raise InvalidRequest(f"{where}.content is missing", field=f"{where}.content")


def _content(parts: Sequence[ContentPart], where: str, role: str, chat_messages: ChatMessages) -> list[dict[str, Any]]:
    """Converts the parts of a message, and collects its pictures and videos in `chat_messages`. Raises
    InvalidRequest."""
    template_parts: list[dict[str, Any]] = []
    for index, part in enumerate(parts):
        field = f"{where}.content[{index}]"
        value = getattr(part, part.type)
        if value is None:
            raise InvalidRequest(f"{field}.{part.type} is missing", field=f"{field}.{part.type}")
        for other in ("text", "image_url", "video_url", "file", "refusal"):
            if other != part.type and getattr(part, other) is not None:
                raise InvalidRequest(f"{field}.{other} needs {field}.type {other}", field=f"{field}.{other}")
        if part.type == "refusal" and role != "assistant":
            raise InvalidRequest(f"{field}: only messages of the role assistant refuse", field=f"{field}.type")
        if isinstance(value, FilePart):
            value = file_text(value.file_data, value.filename, f"{field}.file.file_data", "text")
        if isinstance(value, str) and part.type in ("text", "file", "refusal"):
            template_parts.append({"type": "text", "text": value})
            continue
        if role != "user":
            raise InvalidRequest(f"{field}: only messages of the role user show pictures", field=f"{field}.type")
        _note_modality(part, field, chat_messages.modalities)
        references = chat_messages.pictures if part.type == "image_url" else chat_messages.videos
        references.append(value if isinstance(value, str) else value.url)
        if isinstance(value, MediaUrl):
            openai_fields.tell_detail(value.detail, f"{field}.{part.type}.detail")
        template_parts.append({"type": part.type.removesuffix("_url")})
    return template_parts


def _note_modality(part: ContentPart, field: str, modalities: list[Modality]) -> None:
    """Adds a picture's modality to those that pictures were sent with. Raises InvalidRequest for one that it cannot
    have, or others do not have."""
    if part.modalities is None:
        return
    if (part.modalities == "video") is not (part.type == "video_url"):
        allowed = "video" if part.type == "video_url" else "image or multi-images"
        raise InvalidRequest(f"{field}.modalities must be {allowed} with type {part.type}", field=f"{field}.modalities")
    if part.type == "image_url":
        modalities.append(part.modalities)
    if len(set(modalities)) > 1:
        raise InvalidRequest(
            f"{field}.modalities: the pictures of a chat are image or multi-images, all the same",
            field=f"{field}.modalities",
        )


def _call(call: MessageCall, where: str) -> dict[str, Any]:
    content = getattr(call, call.type)
    if content is None or (call.function is not None and call.custom is not None):
        raise InvalidRequest(
            f"{where} must have {call.type}, as its type says, and nothing else", field=f"{where}.{call.type}"
        )
    sent = {"input": content.input} if isinstance(content, CallCustom) else read_arguments(content.arguments)
    function = {"name": content.name, "arguments": sent}
    return {"id": call.id, "type": "function", "function": function}
