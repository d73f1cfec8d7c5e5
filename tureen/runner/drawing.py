"""Turns a step's logits into tokens: one a row, and one more for every guess that was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tureen.contract.runner import Row, RowOutput
from tureen.grammar import Mask
from tureen.grammar.base import Ending
from tureen.runner.forward import ForwardOutput
from tureen.sampling.arithmetic import Logits
from tureen.sampling.sampler import FAILURES, Draw, Sampler

Masks = Mapping[int, Sequence[Mask]]
"""The masks of constrained rows by slot, one for each token that may be drawn."""

Endings = Mapping[int, Sequence[Ending | None]]
NO_ENDINGS: Endings = {}


def best_outputs(token_ids: Sequence[int]) -> list[RowOutput]:
    """Returns an output for each row with its best token; a negative number in place of a token becomes its error."""
    return [RowOutput((token,)) if token >= 0 else RowOutput(error=FAILURES[token]) for token in token_ids]


def draw(
    sampler: Sampler, rows: Sequence[Row], output: ForwardOutput, masks: Masks, endings: Endings = NO_ENDINGS
) -> list[RowOutput]:
    """Draw the tokens of the rows that sample from the logits of `output`, which are overwritten.

    A guess is verified by drawing as if it were not there (speculative decoding, arXiv:2211.17192, by equality of the
    draws). Random numbers belong to the token's position, so the tokens are those that steps without guesses would
    draw, one a step.
    """
    if any(row.num_drafts for row in rows):
        return _verify(sampler, rows, output, masks, endings)
    first_masks = {slot: of_slot[0] for slot, of_slot in masks.items()}
    if endings:
        _end_words(sampler, output.logits, [row.slot for row in rows], first_masks, endings, 0)
    positions = [row.start + len(row.token_ids) for row in rows]
    slots = [row.slot for row in rows]
    return [_output((drawn,)) for drawn in sampler.sample(output.logits, slots, positions, first_masks, output.peaks)]


def _end_words(
    sampler: Sampler, logits: Logits, slots: Sequence[int], masks: dict[int, Mask], endings: Endings, place: int
) -> None:
    """Ends outputs in which the model has come to the end of a word after which no other word may be begun."""
    for row, slot in enumerate(slots):
        ending = endings[slot][place] if slot in endings else None
        if ending is None:
            continue
        best = sampler.best(logits, row, ending.open)
        if best >= 0 and not masks[slot][best // 32] >> best % 32 & 1:
            masks[slot] = ending.nearer


def _verify(
    sampler: Sampler, rows: Sequence[Row], output: ForwardOutput, masks: Masks, endings: Endings
) -> list[RowOutput]:
    """Draws with guesses: all rows draw their first token; those that drew what was guessed draw the next one; and so
    on."""
    assert output.logits is not None
    firsts, num_draws = [], 0
    for row in rows:
        firsts.append(num_draws)
        num_draws += 1 + row.num_drafts
    draws: list[list[Draw]] = [[] for _ in rows]
    going, place = list(range(len(rows))), 0
    while going:
        slots = [rows[index].slot for index in going]
        positions = [rows[index].start + rows[index].num_known + place for index in going]
        masks_here = {slot: masks[slot][place] for slot in slots if slot in masks}
        logits = output.logits[[firsts[index] + place for index in going]]
        _end_words(sampler, logits, slots, masks_here, endings, place)
        for index, drawn in zip(going, sampler.sample(logits, slots, positions, masks_here), strict=True):
            draws[index].append(drawn)
        going = [index for index in going if _is_right(rows[index], place, draws[index][place])]
        for index in going:
            draws[index][place] = _guessed(draws[index][place])
        place += 1
    return [_output(of_row) for of_row in draws]


def _is_right(row: Row, place: int, drawn: Draw) -> bool:
    """Says whether there was a guess at this place, and it was drawn."""
    return place < row.num_drafts and drawn.token_id == row.token_ids[row.num_known + place]


def _guessed(drawn: Draw) -> Draw:
    """Returns the draw of a token that was guessed, with that in its explanation, where it has one."""
    if drawn.explanation is None:
        return drawn
    return drawn._replace(explanation=msgspec.structs.replace(drawn.explanation, guessed=True))


def _output(draws: Sequence[Draw]) -> RowOutput:
    """Returns a row's output. A failure after the first token is left to the next step, which meets it first."""
    if draws[0].error is not None:
        return RowOutput(error=draws[0].error)
    token_ids = tuple([drawn.token_id for drawn in draws if drawn.token_id is not None])
    return RowOutput(
        token_ids,
        tuple([drawn.logprobs for drawn in draws if drawn.logprobs is not None]),
        explanations=tuple([drawn.explanation for drawn in draws if drawn.explanation is not None]),
    )
