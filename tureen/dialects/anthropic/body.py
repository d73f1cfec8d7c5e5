"""Declares the bodies of Anthropic's API.

Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tureen.contract.params import ALIASES, EMPTY_IS_UNSET, INT64_MAX, INT64_MIN, JsonObject, SamplingParams, Stops
from tureen.errors import InvalidRequest, echo
from tureen.fields.body import TEXT_LISTS, convert, offered
from tureen.fields.rules import FieldTable, FieldWithoutEffect, read_tables
from tureen.fields.shared import Explain, ReturnEffective
from tureen.fields.tools import MAX_TOOLS
from tureen.text.messages import MAX_MESSAGES, MAX_PARTS

TABLE = read_tables(Path(__file__).with_name("fields.toml"))["body"]

SERVER_TOOLS = re.compile(
    r"(web_search|web_fetch|code_execution|advisor|tool_search_tool_bm25|tool_search_tool_regex|mcp_toolset)(_\d{8})?"
)
"""Types of tools that only Anthropic's servers run."""

MAX_MCP_SERVERS = 64
MAX_EDITS = 16
MAX_EXAMPLES = 64

NO_THREADS = "thread_unsupported_request"
"""Code of the error for a thread, a conversation that the server is to keep."""

Body = TypeVar("Body", bound=msgspec.Struct)
T = TypeVar("T")

BlockList = Annotated[list[T], Meta(max_length=MAX_PARTS)]


class AnthropicBase64Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="base64"):
    """A picture in base64."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class AnthropicUrlSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="url"):
    """A picture at a URL."""

    url: str


class AnthropicTextBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """A text block."""

    text: str


class AnthropicImageBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="image"):
    """A picture."""

    source: AnthropicBase64Source | AnthropicUrlSource

    @property
    def reference(self) -> str:
        """The picture as the media loader takes it: a URL or a data URL."""
        if isinstance(self.source, AnthropicUrlSource):
            return self.source.url
        return f"data:{self.source.media_type};base64,{self.source.data}"


class AnthropicTextSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """A document's text."""

    media_type: Literal["text/plain"]
    data: str


class AnthropicContentSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="content"):
    """A document of blocks."""

    content: str | BlockList[AnthropicTextBlock | AnthropicImageBlock]


class AnthropicEncodedSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="base64"):
    """A document in base64, which is a PDF; refused."""

    media_type: str
    data: str


class AnthropicFetchedSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="url"):
    """A PDF at a URL; refused."""

    url: str


class AnthropicDocumentBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="document"):
    """A document: the model is shown its title, its context and its text."""

    source: AnthropicTextSource | AnthropicContentSource | AnthropicEncodedSource | AnthropicFetchedSource
    title: str | None = None
    context: str | None = None


class AnthropicSearchResultBlock(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="search_result"
):
    """A result of a search of the client's: the model is shown its title, its source and its texts."""

    title: str
    source: str
    content: BlockList[AnthropicTextBlock]


class AnthropicServerToolUseBlock(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="server_tool_use"
):
    """A call of a tool that another server ran, in an answer that the client sends back."""

    id: str
    name: str
    input: JsonObject | None = None


class AnthropicServerToolResultBlock(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="server_tool_result"
):
    """The result of such a call, of any type that ends with `_tool_result`. The model reads it as JSON."""

    tool_use_id: str
    content: Any = None


class AnthropicThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="thinking"):
    """Reasoning of an answer that the client sends back."""

    thinking: str
    signature: str = ""  # this server signs nothing


class AnthropicRedactedThinkingBlock(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="redacted_thinking"
):
    """Reasoning that another server has encrypted. It cannot be read here, so it is left out and reported."""

    data: str


class AnthropicToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tool_use"):
    """A tool call of an answer that the client sends back."""

    id: str
    name: str
    input: JsonObject | None = None


class AnthropicCompactionBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="compaction"):
    """A summary of the conversation that another server wrote. The model reads it as text."""

    content: str | None = None


class AnthropicUploadBlock(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="container_upload"
):
    """A file for the tools of another server. It is not kept here, so it is left out and reported."""

    file_id: str


ShownBlock = AnthropicTextBlock | AnthropicImageBlock | AnthropicDocumentBlock | AnthropicSearchResultBlock


class AnthropicToolResultBlock(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tool_result"
):
    """The result of a tool call."""

    tool_use_id: str
    content: str | BlockList[ShownBlock] | None = None
    is_error: bool | None = None


Block = (
    AnthropicTextBlock
    | AnthropicImageBlock
    | AnthropicDocumentBlock
    | AnthropicThinkingBlock
    | AnthropicRedactedThinkingBlock
    | AnthropicSearchResultBlock
    | AnthropicToolUseBlock
    | AnthropicToolResultBlock
    | AnthropicServerToolUseBlock
    | AnthropicServerToolResultBlock
    | AnthropicCompactionBlock
    | AnthropicUploadBlock
)


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | BlockList[Block]


class AnthropicTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. One that only Anthropic's servers run is left out and reported."""

    name: str
    input_schema: Annotated[JsonObject | None, Meta(description="JSON schema of its input, an object.")] = None
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="Its input is always valid against the schema.")] = None
    input_examples: Annotated[
        Annotated[list[JsonObject], Meta(max_length=MAX_EXAMPLES)] | None,
        Meta(description="Inputs that the model reads at the end of the description."),
    ] = None
    allowed_callers: Annotated[
        Annotated[list[str], Meta(max_length=MAX_EXAMPLES)] | None, Meta(description="`direct` must be among them.")
    ] = None
    type: Annotated[str | None, Meta(description="`custom`; or the type of a tool that Anthropic's servers run.")] = (
        None
    )


class AnthropicToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tool`: the one of this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `metadata`."""

    user_id: str | None = None


class AnthropicThinkingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the answer has thinking blocks, but without their text; summarized: with the whole of it."""


class AnthropicContextManagement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `context_management`."""

    edits: Annotated[list[JsonObject], Meta(max_length=MAX_EDITS)] = []


class AnthropicJsonFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer that is JSON, valid against `schema`."""

    type: Literal["json_schema"]
    schema: JsonObject


class AnthropicOutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `output_config`."""

    format: AnthropicJsonFormat | None = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Meta(description="How much the model thinks; reported if its chat template has no such variable."),
    ] = None


Model = Annotated[str, Meta(description="The served model, one of its adapters, or `default`.")]
Messages = Annotated[
    list[AnthropicMessage],
    Meta(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The conversation. Adjacent messages of one role are joined; if the last is the assistant's, the "
        "answer continues it.",
    ),
]
System = Annotated[str | BlockList[AnthropicTextBlock] | None, Meta(description="System message.")]
Tools = Annotated[
    Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None,
    Meta(description="Functions that the client runs. Those that only Anthropic runs are left out and reported."),
]
Choice = Annotated[
    AnthropicToolChoice | None, Meta(description="Whether tools are called: `auto`, `any`, `tool` with a name, `none`.")
]
Thinking = Annotated[
    AnthropicThinkingConfig | None, Meta(description="Whether the model thinks first, for models that can switch it.")
]
Config = Annotated[
    AnthropicOutputConfig | None,
    Meta(description="`format`: the answer is JSON that is valid against its `schema`. `effort`: how much it thinks."),
]
OldFormat = Annotated[AnthropicJsonFormat | None, Meta(description="Another name of `output_config.format`.")]
ContextManagement = Annotated[
    AnthropicContextManagement | None,
    Meta(description="Edits of the conversation; refused if they would take effect, otherwise reported."),
]
McpServers = Annotated[
    Annotated[list[JsonObject], Meta(max_length=MAX_MCP_SERVERS)] | None,
    Meta(description="Servers whose tools only Anthropic calls; reported if the client also sends its own tools."),
]


class AnthropicCountBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/messages/count_tokens`."""

    model: Model
    messages: Messages
    system: System = None
    tools: Tools = None
    tool_choice: Choice = None
    thinking: Thinking = None
    output_config: Config = None
    output_format: OldFormat = None
    context_management: ContextManagement = None
    mcp_servers: McpServers = None


class AnthropicBody(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/messages`: Anthropic's, and sampling parameters that Anthropic does not have."""

    model: Model
    messages: Messages
    max_tokens: Annotated[
        int, Meta(ge=1, description="Most tokens to generate. The context may end the answer earlier.")
    ]
    system: System = None
    tools: Tools = None
    tool_choice: Choice = None
    thinking: Thinking = None
    output_config: Config = None
    output_format: OldFormat = None
    context_management: ContextManagement = None
    mcp_servers: McpServers = None
    temperature: Annotated[float, Meta(ge=0, le=1, description="0 = greedy; higher = more varied.")] = 1.0
    seed: Annotated[
        Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None, Meta(description="Another name of sampling_seed.")
    ] = None
    stop_sequences: Annotated[
        Stops | None, Meta(description="Strings that end the answer. At most --max-stop-strings of 1..1024 characters.")
    ] = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] = False
    metadata: Annotated[
        AnthropicMetadata | None, Meta(description="`user_id`: the end user, logged at level debug.")
    ] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Meta(description="The server has one tier, `standard`.")
    ] = None
    return_effective: ReturnEffective = False
    explain: Explain = False


COUNT_TABLE = TABLE.joined(
    FieldTable(
        told=dict.fromkeys(
            sorted({*AnthropicBody.__struct_fields__, *ALIASES} - {*AnthropicCountBody.__struct_fields__}),
            FieldWithoutEffect("it does not change the tokens of a prompt"),
        )
    )
)
"""The verdicts on the fields of a count: those that only say how the answer is made are told."""


def check_citations(payload: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for documents that the answer is to cite: no answer here has citations."""
    messages = payload.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _check_citations(message.get("content"), f"messages[{index}].content")


def _check_citations(blocks: Any, path: str, *, is_result: bool = False) -> None:
    """Does that for the blocks of a message, and for those of a tool's result in it."""
    for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and not is_result:
            _check_citations(block.get("content"), f"{path}[{number}].content", is_result=True)
        cites = block.get("citations") if kind == "document" else None
        if isinstance(cites, dict) and cites.get("enabled"):
            field = f"{path}[{number}].citations.enabled"
            raise InvalidRequest(f"{field} is not available: citations are not supported; leave it out", field=field)


def parse(payload: dict[str, Any], kind: type[Body]) -> Body:
    """Checks a JSON body's form and returns it as `kind`. Raises InvalidRequest."""
    table = TABLE if kind is AnthropicBody else COUNT_TABLE
    if payload.get("thread") is not None:
        raise InvalidRequest(f"thread is not available: {table.refused['thread'][1]}", field="thread", code=NO_THREADS)
    fields = offered(payload, kind.__struct_fields__, table)
    for name in EMPTY_IS_UNSET:
        if fields.get(name) == "":
            del fields[name]
    fields |= {name: [fields[name]] for name in TEXT_LISTS if isinstance(fields.get(name), str)}
    if isinstance(fields.get("tools"), list) and len(fields["tools"]) <= MAX_TOOLS:
        fields["tools"] = [server_tool_of(tool) or tool for tool in fields["tools"]]
    if isinstance(fields.get("messages"), list) and len(fields["messages"]) <= MAX_MESSAGES:
        fields["messages"] = [_with_server_blocks(message) for message in fields["messages"]]
    body = convert(fields, kind, table=table)
    check_citations(payload)  # once their number is within its limit
    if isinstance(body, AnthropicBody):
        _check_budget(body)
    return body


def _with_server_blocks(message: Any) -> Any:
    """Returns a message of the assistant whose calls and results of tools that a server ran have one type each."""
    content = message.get("content") if isinstance(message, dict) and message.get("role") == "assistant" else None
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        return message
    return message | {"content": [_server_block(block) or block for block in content]}


def _server_block(block: Any) -> dict[str, Any] | None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("server_tool_use", "mcp_tool_use"):
        return {name: block[name] for name in ("id", "name", "input") if name in block} | {"type": "server_tool_use"}
    if isinstance(kind, str) and kind.endswith("_tool_result"):
        names = ("tool_use_id", "content")
        return {name: block[name] for name in names if name in block} | {"type": "server_tool_result"}
    return None


def server_tool_of(tool: Any) -> dict[str, str] | None:
    """Returns type and name of a tool that only Anthropic's servers run, without its settings; None for another."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or not SERVER_TOOLS.fullmatch(kind):
        return None
    name = tool.get("name", tool.get("mcp_server_name"))
    return {"type": kind, "name": name if isinstance(name, str) else kind}


def _check_budget(body: AnthropicBody) -> None:
    """Raises InvalidRequest for a thinking budget without thinking, or one that leaves no token for the answer."""
    field = "thinking.budget_tokens"
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if body.thinking is None or budget is None:
        return
    if body.thinking.type != "enabled":
        raise InvalidRequest(f"{field} needs thinking.type enabled", field=field)
    if budget >= body.max_tokens:
        raise InvalidRequest(
            f"{field} must be less than max_tokens ({echo(body.max_tokens)}), got {echo(budget)}", field=field
        )
