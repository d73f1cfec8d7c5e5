"""Adds up the tokens that the lines of a batch took, of what their answers say."""

from __future__ import annotations

import msgspec


class TokensUsed(msgspec.Struct, frozen=True):
    """The tokens of answers."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: TokensUsed) -> TokensUsed:
        """Returns the sum of both."""
        names = self.__struct_fields__
        return TokensUsed(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Details(msgspec.Struct):
    """The parts of a count of tokens."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class AnswerUsage(msgspec.Struct):
    """`usage` as chats, completions and embeddings have it, and as responses do."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None
    input_tokens_details: Details | None = None
    output_tokens_details: Details | None = None


class AnswerBody(msgspec.Struct):
    """An answer, as far as it matters here."""

    usage: AnswerUsage | None = None


class AnswerResponse(msgspec.Struct):
    """The response in a line of a file of answers."""

    body: AnswerBody | None = None


class AnswerLine(msgspec.Struct):
    """A line of a file of answers."""

    response: AnswerResponse | None = None


NOTHING = TokensUsed()
NO_DETAILS = Details()


def usage_of(text: bytes) -> TokensUsed:
    """Returns the tokens that a line of a file of answers tells of; none where it tells of none."""
    try:
        response = msgspec.json.decode(text, type=AnswerLine).response
    except msgspec.DecodeError:
        return NOTHING
    used = None if response is None or response.body is None else response.body.usage
    if used is None:
        return NOTHING
    read = used.prompt_tokens_details or used.input_tokens_details or NO_DETAILS
    written = used.completion_tokens_details or used.output_tokens_details or NO_DETAILS
    return TokensUsed(
        used.prompt_tokens + used.input_tokens,
        read.cached_tokens or 0,
        used.completion_tokens + used.output_tokens,
        written.reasoning_tokens or 0,
    )
