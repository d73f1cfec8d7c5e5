"""Ollama's API: `/api/chat`, `/api/generate` and what its clients ask about models."""

from __future__ import annotations

from tureen.dialects.ollama import routes as ollama
from tureen.dialects.ollama.body import TABLES, OllamaChatBody, OllamaGenerateBody, OllamaOptions
from tureen.dialects.ollama.embed import OllamaEmbedBody, OllamaEmbeddingsBody
from tureen.fields.tools import ToolList
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect

PAGE = "See [Ollama's API](ollama.md)."
OPTIONS = BodyPart(OllamaOptions, TABLES["options"], "options")

DIALECT = Dialect(
    order=60,
    routes=ollama.routes,
    compat=(
        CompatRoute("Ollama", "/api/chat", (BodyPart(OllamaChatBody, TABLES["body"]), OPTIONS)),
        CompatRoute("Ollama", "/api/generate", (BodyPart(OllamaGenerateBody, TABLES["body"]), OPTIONS)),
        CompatRoute("Ollama", "/api/embed", (BodyPart(OllamaEmbedBody, TABLES["embed"]),)),
        CompatRoute("Ollama", "/api/embeddings", (BodyPart(OllamaEmbeddingsBody, TABLES["embed"]),)),
    ),
    sections=(
        BodySection("`POST /api/chat`", PAGE, OllamaChatBody),
        BodySection("`POST /api/generate`", PAGE, OllamaGenerateBody),
        BodySection("`POST /api/embed`", PAGE, OllamaEmbedBody),
        BodySection("`POST /api/embeddings`", PAGE, OllamaEmbeddingsBody),
        BodySection("`options` of Ollama's API", PAGE, OllamaOptions),
    ),
    errors_below={"/api/": ollama.error_response},
    field_types={(OllamaChatBody, "tools"): ToolList},
)
