"""Merges sampling parameters with their defaults, checks a body's size, and names its requests."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from tureen.config import MAX_STOPS, Config
from tureen.contract.params import (
    MAX_BAD_WORDS,
    MAX_PATTERN_LEN,
    SamplingParams,
    check_params,
)
from tureen.contract.types import BannedTokens
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.body import convert
from tureen.requests.offload import offload
from tureen.requests.state import Context
from tureen.text.tokenizer import Tokenizer

T = TypeVar("T")

MAX_SEQUENCES = 512
MAX_RID_CHARS = 256
PATTERN_SIZE = 32
"""Cost of compiling one character of a stop pattern for `offload`: as long as tokenizing this many."""

Origin = Literal["request", "model", "server", "default"]


class Names(NamedTuple):
    """An API's names for sampling parameters, for its errors."""

    where: str = ""  # the object that contains them; "" = the body itself
    renamed: Mapping[str, str] = {}  # SamplingParams' name -> the API's, where they differ

    def path(self, parameter: str) -> str:
        """Returns what an error calls a parameter."""
        name = self.renamed.get(parameter, parameter)
        return f"{self.where}.{name}" if self.where else name


class Sampling(NamedTuple):
    """One prompt's sampling parameters, and the origin of each that does not have its documented default."""

    params: SamplingParams
    origins: Mapping[str, Origin]
    names: Names
    banned: BannedTokens | None = None  # the tokens of bad_words


def make_sampling(
    requested: Mapping[str, Any],
    context: Context,
    names: Names,
    defaults: Mapping[str, Any] | None = None,
    *,
    as_recommended: bool = False,
) -> Sampling:
    """Merges the request's parameters over the server's, the model's and the API's defaults, in this order of priority,
    and checks them.

    `as_recommended`: the API uses the values that the model's authors recommend. Raises InvalidRequest.
    """
    server, recommended = context.defaults
    model = recommended if as_recommended else {}
    sources: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
        ("default", defaults or {}),
        ("model", model),
        ("server", server),
        ("request", requested),
    )
    fields: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for origin, values in sources:
        fields |= values
        origins |= dict.fromkeys(values, origin)
    params = _with_known_ends(convert(fields, SamplingParams, names.path), context.info.vocab_size, names)
    _check_limits(params, context.config, names)
    check_params(params, vocab_size=context.info.vocab_size, path=names.path)
    return Sampling(params, origins, names, _banned(params, context.tokenizer, names))


def _with_known_ends(params: SamplingParams, vocab_size: int, names: Names) -> SamplingParams:
    """Returns the parameters without stop token ids beyond the vocabulary, and reports these as ignored."""
    known = tuple(token_id for token_id in params.stop_token_ids if token_id < vocab_size)
    if len(known) == len(params.stop_token_ids):
        return params
    ignored.tell(
        names.path("stop_token_ids"), f"the vocabulary has {vocab_size} tokens, so no output has all these ids"
    )
    return msgspec.structs.replace(params, stop_token_ids=known)


def _banned(params: SamplingParams, tokenizer: Tokenizer, names: Names) -> BannedTokens | None:
    """Returns the tokens of each bad word. As in vLLM, adds those of the word with a leading space if they have another
    first token and the same length."""
    sequences: list[tuple[int, ...]] = []
    for word in params.bad_words:
        alone, within = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        sequences.append(alone)
        if len(within) == len(alone) and within[:1] != alone[:1]:
            sequences.append(within)
    known = tuple(filter(None, dict.fromkeys(sequences)))
    return BannedTokens(names.path("bad_words"), known) if known else None


def _check_limits(params: SamplingParams, config: Config, names: Names) -> None:
    """Raises InvalidRequest for more samples or stop strings than the operator allows."""
    if params.n > config.max_n:
        field = names.path("n")
        raise InvalidRequest(f"{field} must be at most {config.max_n} (--max-n), got {params.n}", field=field)
    for name in ("stop", "stop_regex"):
        count = len(getattr(params, name))
        if count > config.max_stop_strings:
            field = names.path(name)
            most = f"{config.max_stop_strings} entries (--max-stop-strings)"
            raise InvalidRequest(f"{field} takes at most {most}, got {count}", field=field)


async def sampling_of(
    requested: Mapping[str, Any],
    context: Context,
    names: Names,
    defaults: Mapping[str, Any] | None = None,
    *,
    as_recommended: bool = True,
) -> Sampling:
    """Calls `make_sampling`, in a thread if stop patterns or bad words make it slow. Raises InvalidRequest."""
    size = PATTERN_SIZE * patterns_len([requested]) + words_len([requested])
    return await offload.run(
        size, lambda: make_sampling(requested, context, names, defaults, as_recommended=as_recommended)
    )


def words_len(param_sets: Iterable[Any]) -> int:
    """Returns the number of characters of bad words to tokenize. The form of the prompts' parameters may be
    unchecked."""
    num_chars = 0
    for params in param_sets:
        words = params.get("bad_words") if isinstance(params, Mapping) else None
        known = words[:MAX_BAD_WORDS] if isinstance(words, list | tuple) else ()
        num_chars += 2 * sum(len(word) for word in known if isinstance(word, str))
    return num_chars


def patterns_len(param_sets: Iterable[Any]) -> int:
    """Returns the number of characters of all different stop patterns. The form of the prompts' parameters may be
    unchecked.

    Raises InvalidRequest if they exceed the limit of one prompt.
    """
    patterns: set[str] = set()
    for params in param_sets:
        stop_regex = params.get("stop_regex") if isinstance(params, Mapping) else None
        if isinstance(stop_regex, list | tuple):
            patterns.update(pattern for pattern in stop_regex[:MAX_STOPS] if isinstance(pattern, str))
    length = sum(map(len, patterns))
    if length > MAX_PATTERN_LEN:
        raise InvalidRequest(
            f"stop_regex: all patterns may have {MAX_PATTERN_LEN} characters, got {length}", field="stop_regex"
        )
    return length


def check_size(num_prompts: int, samplings: Sequence[Sampling], prompt_field: str, config: Config) -> int:
    """Returns the number of samples per prompt, which must be the same for all prompts. Raises InvalidRequest for a
    batch that is empty or has too many sequences."""
    if not num_prompts:
        raise InvalidRequest(
            f"{prompt_field} is an empty list; it must have at least one prompt",
            field=prompt_field,
            code="empty_prompt",
        )
    field = samplings[0].names.path("n")
    num_samples = samplings[0].params.n
    if any(sampling.params.n != num_samples for sampling in samplings):
        raise InvalidRequest(f"{field} must be the same for all prompts of a batch", field=field)
    most = max(MAX_SEQUENCES, config.max_batch_size, config.max_n)
    if num_prompts * num_samples > most:
        raise InvalidRequest(
            f"{num_prompts} prompts with {field} = {num_samples} make {num_prompts * num_samples} sequences; "
            f"at most {most}, the largest of {MAX_SEQUENCES}, --max-batch-size and --max-n",
            field=field,
        )
    return num_samples


def check_batch(count: int, field: str, context: Context, max_prompts: int | None = None) -> None:
    """Raises InvalidRequest if a body has too many prompts. `max_prompts`: None = --max-batch-size."""
    most = context.config.max_batch_size if max_prompts is None else max_prompts
    if count > most:
        setting = " (--max-batch-size)" if max_prompts is None else ""
        raise InvalidRequest(f"{field} is a batch of at most {most} prompts{setting}, got {count}", field=field)


def check_priority(priority: int, context: Context) -> None:
    """Raises InvalidRequest for a priority on a server that does not schedule by priority."""
    if priority and not context.config.enable_priority_scheduling:
        raise InvalidRequest(
            f"priority is {priority}, but the server runs without --enable-priority-scheduling; leave it out",
            field="priority",
        )


def name_requests(
    rid: str | list[str] | None, batch: int, num_samples: int, *, is_batch: bool
) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Returns the names that a client may abort by, each with the indices of its requests, and each request's own name.

    A batch with the rid `r` gets r_0, r_1, …, and so do samples. Raises InvalidRequest.
    """
    rids = _rids(rid, batch, is_batch)
    names: dict[str, tuple[int, ...]] = {}
    own_names: list[str] = []
    for index, prompt_rid in enumerate(rids):
        indices = tuple(range(index * num_samples, (index + 1) * num_samples))
        names[prompt_rid] = indices
        if num_samples > 1:
            names.update({f"{prompt_rid}_{sample}": (indices[sample],) for sample in range(num_samples)})
        own_names += [f"{prompt_rid}_{sample}" if num_samples > 1 else prompt_rid for sample in range(num_samples)]
    if isinstance(rid, str):
        names[rid] = tuple(range(len(own_names)))
    elif num_samples > 1 and len(names) < len(rids) + len(own_names):
        raise InvalidRequest("rid has an id that equals the id of another sample, such as x and x_0", field="rid")
    return names, tuple(own_names)


def check_rid(rid: str, field: str) -> None:
    """Raises InvalidRequest with `field` unless `rid` is short printable ASCII."""
    if not (1 <= len(rid) <= MAX_RID_CHARS and rid.isascii() and rid.isprintable()):
        raise InvalidRequest(
            f"{field} must be 1 to {MAX_RID_CHARS} printable ASCII characters, got {echo(rid)}", field=field
        )


def _rids(rid: str | list[str] | None, batch: int, is_batch: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(batch)]
    if isinstance(rid, str):
        rids = [f"{rid}_{index}" for index in range(batch)] if is_batch else [rid]
    elif is_batch:
        rids = per_prompt(rid, batch, "rid")
    else:
        raise InvalidRequest("rid is a list, but there is one prompt, not a batch; send a string", field="rid")
    for sent_rid in [rid] if isinstance(rid, str) else rids:
        check_rid(sent_rid, "rid")
    if len(set(rids)) < len(rids):
        raise InvalidRequest("rid has the same id twice; each prompt of a batch needs its own", field="rid")
    return rids


def per_prompt(value: list[T] | T, batch: int, name: str) -> list[T]:
    """Returns a value for each prompt: a list unchanged, anything else repeated. Raises InvalidRequest for a list of
    another length."""
    if not isinstance(value, list):
        return [value] * batch
    if len(value) != batch:
        raise InvalidRequest(f"{name} has {len(value)} entries, but the batch has {batch} prompts", field=name)
    return value


def fields_per_prompt(body: object, names: Iterable[str], batch: int) -> dict[str, list[Any]]:
    """Returns these fields of a body, each with a value for every prompt. Raises InvalidRequest for a list of another
    length."""
    return {name: per_prompt(getattr(body, name), batch, name) for name in names}
