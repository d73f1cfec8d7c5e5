"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from tureen.dialects.anthropic import messages as anthropic
from tureen.dialects.anthropic.body import COUNT_TABLE, TABLE, AnthropicBody, AnthropicCountBody
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect

DIALECT = Dialect(
    order=50,
    routes=anthropic.routes,
    compat=(
        CompatRoute("Anthropic", "/v1/messages", (BodyPart(AnthropicBody, TABLE),)),
        CompatRoute("Anthropic", "/v1/messages/count_tokens", (BodyPart(AnthropicCountBody, COUNT_TABLE),)),
    ),
    sections=(
        BodySection(
            "`POST /v1/messages`", "See [Anthropic's API](anthropic.md). Sampling parameters too.", AnthropicBody
        ),
    ),
    errors_with={("/v1/", "anthropic-version"): anthropic.error_response},
)
