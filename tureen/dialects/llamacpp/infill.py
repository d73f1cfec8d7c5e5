"""Makes the prompts of `/infill`.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md, arXiv:2409.12186 (several files)
"""

from __future__ import annotations

from tureen.dialects.llamacpp.body import LlamaInfillBody
from tureen.requests import tokenising
from tureen.requests.fill_in_middle import fill_in_tokens
from tureen.requests.prompts import Prompt, id_lists
from tureen.requests.state import Context
from tureen.text.fill_in import FillIn
from tureen.text.tokenizer import Tokenizer

REPOSITORY_MARKS = ("<|repo_name|>", "<repo_name>", "<reponame>")
FILE_MARKS = ("<|file_sep|>", "<file_sep>")
SNIPPET = "\n\n--- snippet ---\n\n"


def end_ids(context: Context) -> tuple[int, ...]:
    """Return the tokens that end the filled-in text. Raises InvalidRequest if the model cannot fill in a gap."""
    return _marks(context).end_ids


async def infill_prompt(body: LlamaInfillBody, context: Context) -> Prompt:
    """Return the prompt that asks for the text between prefix and suffix. Raises InvalidRequest."""
    tokenizer, marks = context.tokenizer, _marks(context)
    before = body.input_prefix + body.prompt
    fields = ["input_prefix", "input_suffix", *(f"input_extra[{index}].text" for index in range(len(body.input_extra)))]
    texts = [before, body.input_suffix, *(extra.text for extra in body.input_extra)]
    tokenising.check_lengths(texts, fields, context)
    whole = "".join([*texts, *(extra.filename for extra in body.input_extra)])
    tokenising.check_lengths([whole], ["input_extra"], context)
    [start] = await tokenising.encode([""], tokenizer)
    prefix, suffix = await tokenising.encode([before, body.input_suffix], tokenizer, add_special_tokens=False)
    ids = [*await _others(body, tokenizer), *marks.prompt(start[:1], prefix, suffix)]
    [prompt] = id_lists(ids, context, may_be_empty=False, field="input_prefix")
    return prompt


async def _others(body: LlamaInfillBody, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of the other files: each after its name, if the model has marks for that."""
    if not body.input_extra:
        return []
    repository, file = (_first_id(names, tokenizer) for names in (REPOSITORY_MARKS, FILE_MARKS))
    heads = [f"{extra.filename}\n" if file is not None else SNIPPET for extra in body.input_extra]
    texts = [text for head, extra in zip(heads, body.input_extra, strict=True) for text in (head, extra.text)]
    opening, last, *encoded = await tokenising.encode(
        ["myproject\n", "filename\n", *texts], tokenizer, add_special_tokens=False
    )
    ids = [] if repository is None else [repository, *opening]
    for head_ids, text_ids in zip(encoded[::2], encoded[1::2], strict=True):
        ids += [*([] if file is None else [file]), *head_ids, *text_ids]
    return ids if file is None else [*ids, file, *last]


def _first_id(names: tuple[str, ...], tokenizer: Tokenizer) -> int | None:
    ids = map(tokenizer.token_id, names)
    return next((token_id for token_id in ids if token_id is not None), None)


def _marks(context: Context) -> FillIn:
    return fill_in_tokens(context, "input_suffix", "send the text to /completion")
