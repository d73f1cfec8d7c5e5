"""Compares a model that runs with this server's attention with the same model in plain transformers.

A model's code can depend on more than its attention calls show: on a state of its own, on the token ids, on positions
that it counts itself. Such a model would answer wrongly or mix requests. Two short texts show it at the start.

Imports: contract, errors, runner; torch.
Imported by: runner.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tureen.contract.runner import Batch, Row
from tureen.errors import StartupError
from tureen.runner.forward import Forward

LENGTHS: Final = (13, 9)
"""Tokens of each text."""
WAYS: Final[dict[str, tuple[tuple[tuple[int, int], ...], ...]]] = {
    "alone": (((0, 13),), ((1, 9),)),
    "together with another one": (((0, 13), (1, 9)),),
    "in pieces": (((0, 6), (1, 3)), ((1, 2), (0, 4)), ((0, 1), (1, 2)), ((0, 1), (1, 1)), ((0, 1), (1, 1))),
}
"""Ways to compute the texts, as batches; a batch lists texts and how many of their next tokens it computes."""


class Limit(NamedTuple):
    """The largest error that rounding can explain, in shares of the spread of a token's logits."""

    error: float
    share: float  # of the tokens computed in one way that must keep to it: rounding sends some to other experts


LIMITS: Final = {
    torch.float32: Limit(1e-3, 0.9),
    torch.float16: Limit(0.05, 0.5),
    torch.bfloat16: Limit(0.12, 0.5),
}
"""Measured on right models: 2e-6 in float32, and with 40 layers 0.012 in float16, 0.085 in bfloat16. Wrong ones had
medians from 0.12 in float32 and 0.16 in bfloat16."""


FORBIDDEN: Final = 1e4
"""Logits from this size on are not compared: models forbid a token with minus infinity or the lowest number."""


class OwnLogits(NamedTuple):
    """A short text with the logits that transformers computes."""

    token_ids: tuple[int, ...]
    logits: Tensor  # float32 [tokens, vocab]


def num_pages(page_size: int) -> int:
    """Returns the number of KV pages that `check` writes to."""
    return sum(-(-length // page_size) for length in LENGTHS)


@torch.inference_mode()
def own_samples(model: Any) -> list[OwnLogits]:
    """Runs the unmodified model on two texts of random tokens. Raises StartupError if its logits are not numbers."""
    text = model.config.get_text_config()
    special = set(_special_ids(model.config.to_dict()))
    ordinary = [token for token in range(text.vocab_size) if token not in special]
    generator = random.Random(0)
    samples = []
    for length in LENGTHS:
        token_ids = generator.choices(ordinary, k=length)
        logits = model(torch.tensor([token_ids], device=model.device), use_cache=False).logits[0].float()
        if logits.isnan().any():
            raise StartupError(
                f"--model-impl transformers: transformers' own logits are not finite in {_name(model.dtype)}; use "
                "another --dtype, such as float32",
                field="dtype",
            )
        samples.append(OwnLogits(tuple(token_ids), logits))
    return samples


def _special_ids(config: dict[str, Any]) -> Iterator[int]:
    """Yields the ids that a configuration, or one inside of it, gives a meaning: padding, pictures, ends."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _special_ids(value)
        elif str(key).endswith(("token_id", "token_index")):
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))


@torch.inference_mode()
def check(forward: Forward, samples: list[OwnLogits], page_size: int, dtype: torch.dtype) -> None:
    """Computes the texts alone, together and in pieces. Raises StartupError if the logits are not transformers' own."""
    limit = LIMITS[dtype]
    for way, batches in WAYS.items():
        pairs = list(_computed(forward, samples, page_size, batches))
        errors = torch.cat([_errors(ours, own) for ours, own in pairs])
        if errors.quantile(limit.share) <= limit.error:
            continue
        nats = max(float((ours.log_softmax(-1) - own.log_softmax(-1)).abs().max()) for ours, own in pairs)
        retry = "" if dtype is torch.float32 else f"; --dtype float32 shows whether rounding to {_name(dtype)} is why"
        raise StartupError(
            "--model-impl transformers: with this server's attention the model is not what it is in transformers: "
            f"log-probabilities of a text that is computed {way} differ by up to {nats:.2g}. Such models are not "
            f"supported; take one that `tureen models` lists, or use transformers itself{retry}",
            field="model_impl",
        )


def _errors(ours: Tensor, own: Tensor) -> Tensor:
    """Returns each token's error in shares of the spread of its logits: [tokens]; 1 for what is not a number."""
    usual = own.abs().amax(0) < FORBIDDEN
    ours, own = ours[:, usual], own[:, usual]
    spread = (own - own.mean(-1, keepdim=True)).square().sum(-1).sqrt()
    distance = (ours - own).square().sum(-1).sqrt()
    return (distance / spread.clamp_min(1e-6)).nan_to_num(1.0)


def _computed(
    forward: Forward, samples: list[OwnLogits], page_size: int, batches: tuple[tuple[tuple[int, int], ...], ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields for each row of the batches its logits from `forward` and from transformers: [tokens, vocab] each."""
    first = -(-LENGTHS[0] // page_size)
    pages = (tuple(range(first)), tuple(range(first, num_pages(page_size))))
    starts = [0, 0]
    for batch in batches:
        rows, parts = [], []
        for text, count in batch:
            part = slice(starts[text], starts[text] + count)
            token_ids = samples[text].token_ids[part]
            rows.append(Row(text, token_ids, part.start, pages[text], False, score_targets=token_ids))
            parts.append(samples[text].logits[part])
            starts[text] += count
        scored = [torch.as_tensor(piece).float() for piece in forward.run(Batch(tuple(rows))).scored]
        yield torch.cat(scored), torch.cat(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
