"""Makes prompts of completions that fill the gap between a prompt and a suffix."""

from __future__ import annotations

from collections.abc import Sequence

from tureen.errors import InvalidRequest
from tureen.requests import tokenising
from tureen.requests.prompts import Prompt
from tureen.requests.state import Context
from tureen.text.fill_in import FillIn, fill_in_of


def fill_in_tokens(context: Context, field: str = "suffix", fix: str = "leave it out") -> FillIn:
    """Returns the model's tokens for filling in a gap. Raises InvalidRequest if it has none, with the client's name of
    the suffix and the way out."""
    tokens = fill_in_of(context.tokenizer)
    if tokens is None:
        raise InvalidRequest(
            f"{field}: the model {context.info.model_name} has no fill-in-the-middle tokens, such as <|fim_middle|>; "
            f"{fix}",
            field=field,
            code="not_available",
        )
    return tokens


async def fill_in_prompts(texts: Sequence[str], names: Sequence[str], suffix: str, context: Context) -> list[Prompt]:
    """Returns the prompts for the text between each of the texts and `suffix`. `names`: what errors call each text.
    Raises InvalidRequest."""
    tokens, tokenizer = fill_in_tokens(context), context.tokenizer
    tokenising.check_lengths([*texts, suffix], [*names, "suffix"], context)
    [start] = await tokenising.encode([""], tokenizer)
    *before, after = await tokenising.encode([*texts, suffix], tokenizer, add_special_tokens=False)
    prompts = [Prompt(tokens.prompt(start[:1], ids, after)) for ids in before]
    for prompt, name in zip(prompts, names, strict=True):
        tokenising.check_tokens(prompt.token_ids, name, context)
    return prompts
