"""Sampling parameters with their defaults merged, and the names that clients give their requests."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from tureen.contract.params import MAX_PATTERN_LEN, MAX_STOPS, SamplingParams, check_params
from tureen.errors import InvalidRequest, echo
from tureen.requests.body import convert
from tureen.requests.offload import offload
from tureen.requests.prompts import check_batch
from tureen.requests.shared_fields import MAX_PROMPTS
from tureen.requests.state import Context

T = TypeVar("T")

MAX_SEQUENCES = 512
MAX_RID_CHARS = 256
PATTERN_SIZE = 32
"""Characters of text that are tokenized in the time in which one of a stop pattern is compiled."""

Origin = Literal["request", "model", "server", "default"]


class Names(NamedTuple):
    """What a dialect calls the sampling parameters, for its errors."""

    where: str = ""  # the object they stand in; "" = the body itself
    renamed: Mapping[str, str] = {}

    def path(self, parameter: str) -> str:
        name = self.renamed.get(parameter, parameter)
        return f"{self.where}.{name}" if self.where else name


class Sampling(NamedTuple):
    """One prompt's sampling parameters, and where those came from that are not the documented default."""

    params: SamplingParams
    origins: Mapping[str, Origin]
    names: Names


def make_sampling(
    given: Mapping[str, Any], context: Context, names: Names, defaults: Mapping[str, Any] | None = None
) -> Sampling:
    """Merge what the request says over the server's, the model's and the dialect's defaults. Raises InvalidRequest."""
    server, model = context.defaults
    sources: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
        ("default", defaults or {}),
        ("model", model),
        ("server", server),
        ("request", given),
    )
    fields: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for origin, values in sources:
        fields |= values
        origins |= dict.fromkeys(values, origin)
    params = convert(fields, SamplingParams, names.path)
    check_params(params, vocab_size=context.info.vocab_size, path=names.path)
    return Sampling(params, origins, names)


async def sampling_of(
    given: Mapping[str, Any], context: Context, names: Names, defaults: Mapping[str, Any] | None = None
) -> Sampling:
    """The same, beside the event loop where it takes long. Raises InvalidRequest."""
    size = PATTERN_SIZE * patterns_len([given])
    return await offload.run(size, lambda: make_sampling(given, context, names, defaults))


def patterns_len(given: Iterable[Mapping[str, Any]]) -> int:
    """Characters of the different stop patterns that prompts' parameters have. Raises InvalidRequest for more than
    those of one prompt may have."""
    patterns: set[str] = set()
    for params in given:
        some = params.get("stop_regex")
        if isinstance(some, list | tuple):
            patterns.update(one for one in some[:MAX_STOPS] if isinstance(one, str))
    length = sum(map(len, patterns))
    if length > MAX_PATTERN_LEN:
        raise InvalidRequest(
            f"stop_regex: all patterns may have {MAX_PATTERN_LEN} characters, got {length}", field="stop_regex"
        )
    return length


def check_size(num_prompts: int, samplings: Sequence[Sampling], prompt_field: str) -> int:
    """Samples per prompt, the same for all. Raises InvalidRequest for an empty batch and for more than one may have."""
    if not num_prompts:
        raise InvalidRequest(
            f"{prompt_field} is an empty list; it must have at least one prompt",
            field=prompt_field,
            code="empty_prompt",
        )
    check_batch(num_prompts, MAX_PROMPTS, prompt_field)
    field = samplings[0].names.path("n")
    num_samples = samplings[0].params.n
    if any(sampling.params.n != num_samples for sampling in samplings):
        raise InvalidRequest(f"{field} must be the same for all prompts of a batch", field=field)
    if num_prompts * num_samples > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{num_prompts} prompts with {field} = {num_samples} make {num_prompts * num_samples} sequences; "
            f"at most {MAX_SEQUENCES}",
            field=field,
        )
    return num_samples


def check_priority(priority: int, context: Context) -> None:
    """Raises InvalidRequest for one on a server that runs requests in another order."""
    if priority and not context.config.enable_priority_scheduling:
        raise InvalidRequest(
            f"priority is {priority}, but the server runs without --enable-priority-scheduling; leave it out",
            field="priority",
        )


def name_requests(
    rid: str | list[str] | None, batch: int, num_samples: int, *, is_batch: bool
) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Every name a client may abort by, with the indices of the requests it means; and each request's own name.

    A batch of rid `r` gets r_0, r_1, …, and so do samples. Raises InvalidRequest.
    """
    rids = _rids(rid, batch, is_batch)
    names: dict[str, tuple[int, ...]] = {}
    own: list[str] = []
    for index, one in enumerate(rids):
        indices = tuple(range(index * num_samples, (index + 1) * num_samples))
        names[one] = indices
        if num_samples > 1:
            names.update({f"{one}_{sample}": (indices[sample],) for sample in range(num_samples)})
        own += [f"{one}_{sample}" if num_samples > 1 else one for sample in range(num_samples)]
    if isinstance(rid, str):
        names[rid] = tuple(range(len(own)))
    elif num_samples > 1 and len(names) < len(rids) + len(own):
        raise InvalidRequest("rid has an id that is also that of another's sample, such as x and x_0", field="rid")
    return names, tuple(own)


def check_rid(rid: str, field: str) -> None:
    """Raises InvalidRequest with the field."""
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
    for one in [rid] if isinstance(rid, str) else rids:
        check_rid(one, "rid")
    if len(set(rids)) < len(rids):
        raise InvalidRequest("rid has the same id twice; each prompt of a batch needs its own", field="rid")
    return rids


def per_prompt(value: list[T] | T, batch: int, name: str) -> list[T]:
    """One value for each prompt. Raises InvalidRequest for a list of another length."""
    if not isinstance(value, list):
        return [value] * batch
    if len(value) != batch:
        raise InvalidRequest(f"{name} has {len(value)} entries, but the batch has {batch} prompts", field=name)
    return value
