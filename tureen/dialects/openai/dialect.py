"""OpenAI's API: completions, chats, responses, embeddings; and `/tokenize`, which takes its messages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from tureen.dialects.openai import batch_body, batch_routes, file_routes, tokenize_routes
from tureen.dialects.openai import chat as openai_chat
from tureen.dialects.openai import chat_body as openai_chat_fields
from tureen.dialects.openai import completions as openai_completions
from tureen.dialects.openai import conversations as openai_conversations
from tureen.dialects.openai import embeddings as openai_embeddings
from tureen.dialects.openai import invocations as openai_invocations
from tureen.dialects.openai import responses as openai_responses
from tureen.dialects.openai import responses_body as openai_responses_fields
from tureen.dialects.openai.batch_body import BatchBody
from tureen.dialects.openai.chat_body import ChatBody
from tureen.dialects.openai.completions import CompletionBody
from tureen.dialects.openai.conversations import (
    MAX_ITEMS,
    ConversationBody,
    ConversationItemsBody,
    ConversationNotesBody,
)
from tureen.dialects.openai.embeddings import EmbeddingsBody
from tureen.dialects.openai.responses_body import ResponsesBody
from tureen.dialects.openai.responses_input import SentItem
from tureen.dialects.openai.responses_tools import AllowedTool, AllowedTools
from tureen.dialects.openai.tokenize_routes import DetokenizeBody, TokenizeBody
from tureen.fields.tools import ToolChoiceField, ToolList
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect, Entry
from tureen.requests.state import ServerState
from tureen.text.messages import MAX_MESSAGES

if TYPE_CHECKING:
    from tureen.dialects.openai.batches import BatchService

ToolChoiceMode = Literal["auto", "none", "required"]

WITH_PARAMETERS = "See [OpenAI's API](openai.md). Sampling parameters too, by their own names."
CONVERSATIONS = "See [Responses](responses.md)."
VERSION = "/v1"
EMBEDDINGS = "See [embeddings](embeddings.md)."


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes of all modules of this API, each with and without `/v1`."""
    modules = (
        openai_completions,
        openai_chat,
        openai_responses,
        openai_conversations,
        openai_embeddings,
        tokenize_routes,
    )
    entries = [entry for module in modules for entry in module.routes(state)]
    service = _open_batches(state, entries)
    entries += [*file_routes.routes(service), *batch_routes.routes(state, service)]
    without_version = [
        entry.at(entry.path.removeprefix(VERSION)) for entry in entries if entry.path.startswith(VERSION)
    ]
    return [*entries, *without_version, *openai_invocations.routes(state, entries)]


def _open_batches(state: ServerState, entries: list[Entry]) -> BatchService | None:
    """Opens the folder of --batch-path; None where no batches are run. Raises StartupError."""
    if state.context.config.batch_path is None:
        return None
    batches = importlib.import_module("tureen.dialects.openai.batches")  # SQLite and forms, for those who use them
    service: BatchService = batches.BatchService(state, entries)
    state.lifecycle.services.append(service)
    return service


DIALECT = Dialect(
    order=40,
    routes=routes,
    compat=(
        CompatRoute("OpenAI", "/v1/completions", (BodyPart(CompletionBody, openai_completions.TABLE),)),
        CompatRoute("OpenAI", "/v1/chat/completions", (BodyPart(ChatBody, openai_chat_fields.TABLE),)),
        CompatRoute("OpenAI", "/v1/responses", (BodyPart(ResponsesBody, openai_responses_fields.TABLE),)),
        CompatRoute("OpenAI", "/v1/embeddings", (BodyPart(EmbeddingsBody, openai_embeddings.TABLE),)),
        CompatRoute("OpenAI", "/v1/batches", (BodyPart(BatchBody, batch_body.TABLE),)),
        CompatRoute("SGLang and vLLM", "/tokenize", (BodyPart(TokenizeBody, tokenize_routes.TABLE),)),
        CompatRoute("SGLang and vLLM", "/detokenize", (BodyPart(DetokenizeBody, tokenize_routes.TABLE),)),
    ),
    sections=(
        BodySection("`POST /v1/chat/completions`", WITH_PARAMETERS, ChatBody),
        BodySection("`POST /v1/completions`", WITH_PARAMETERS, CompletionBody),
        BodySection("`POST /v1/responses`", "See [Responses](responses.md). Sampling parameters too.", ResponsesBody),
        BodySection("`POST /v1/conversations`", CONVERSATIONS, ConversationBody),
        BodySection("`POST /v1/conversations/{id}`", CONVERSATIONS, ConversationNotesBody),
        BodySection("`POST /v1/conversations/{id}/items`", CONVERSATIONS, ConversationItemsBody),
        BodySection("`POST /v1/embeddings`", EMBEDDINGS, EmbeddingsBody),
        BodySection("`POST /v1/batches`", "See [batches](batches.md).", BatchBody),
        BodySection("`POST /tokenize`", EMBEDDINGS, TokenizeBody),
        BodySection("`POST /detokenize`", EMBEDDINGS, DetokenizeBody),
    ),
    field_types={
        (ChatBody, "tools"): ToolList,
        (ChatBody, "tool_choice"): ToolChoiceMode | ToolChoiceField,
        (TokenizeBody, "tools"): ToolList,
        (ResponsesBody, "tool_choice"): ToolChoiceMode | AllowedTool | AllowedTools,
        (ResponsesBody, "input"): str | Annotated[list[SentItem], Meta(max_length=MAX_MESSAGES)],
        (ConversationBody, "items"): Annotated[list[SentItem], Meta(max_length=MAX_ITEMS)],
        (ConversationItemsBody, "items"): Annotated[list[SentItem], Meta(min_length=1, max_length=MAX_ITEMS)],
    },
)
