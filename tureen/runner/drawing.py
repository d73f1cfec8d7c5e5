"""Turns a step's logits into tokens: one a row, and one more for every guess that was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, count

import msgspec

from tureen.contract.runner import Row, RowOutput
from tureen.grammar import Mask
from tureen.grammar.base import Ending
from tureen.runner.forward import ForwardOutput
from tureen.sampling.arithmetic import Logits, Peaks
from tureen.sampling.sampler import FAILURES, Draw, Sampler

Masks = Mapping[int, Sequence[Mask]]
"""The masks of constrained rows by slot, one for each token that may be drawn."""

Endings = Mapping[int, Sequence[Ending | None]]
NO_ENDINGS: Endings = {}


def best_outputs(rows: Sequence[Row], best: Sequence[int]) -> list[RowOutput]:
    """Returns the output of each row that samples from the best token of each draw, negative for an error."""
    if len(best) == len(rows):  # no row has guesses
        return [RowOutput((token,)) if token >= 0 else RowOutput(error=FAILURES[token]) for token in best]
    outputs, first = [], 0
    for row in rows:
        draws = [
            Draw(token) if token >= 0 else Draw(error=FAILURES[token]) for token in best[first:][: 1 + row.num_drafts]
        ]
        outputs.append(_output(row, draws))
        first += len(draws)
    return outputs


def draw(
    sampler: Sampler, rows: Sequence[Row], output: ForwardOutput, masks: Masks, endings: Endings = NO_ENDINGS
) -> list[RowOutput]:
    """Draw the tokens of the rows that sample from the logits of `output`, which are overwritten.

    A guess is verified by drawing as if it were not there (speculative decoding, arXiv:2211.17192, by equality of the
    draws). Random numbers belong to the token's position, so the tokens are those that steps without guesses would
    draw, one a step. All places of a row are drawn together, or one after another if the sampler follows its tokens.
    """
    assert output.logits is not None
    firsts = list(accumulate((1 + row.num_drafts for row in rows), initial=0))
    following = sampler.following
    places = [
        (index, place)
        for index, row in enumerate(rows)
        for place in range(1 if row.slot in following else 1 + row.num_drafts)
    ]
    draws: list[list[Draw]] = [[] for _ in rows]
    while places:
        logits, peaks = output.logits, output.peaks
        if len(places) != len(logits):
            chosen = [firsts[index] + place for index, place in places]
            logits = logits[chosen]
            peaks = None if peaks is None else Peaks(peaks.values[chosen], peaks.token_ids[chosen])
        slots = [rows[index].slot for index, _ in places]
        positions = [rows[index].start + rows[index].num_known + place for index, place in places]
        here = {at: masks[slot][places[at][1]] for at, slot in enumerate(slots) if slot in masks}
        for at, slot in enumerate(slots):
            if slot in endings:
                _end_word(sampler, logits, at, here, endings[slot][places[at][1]])
        for (index, _), drawn in zip(places, sampler.sample(logits, slots, positions, here, peaks), strict=True):
            draws[index].append(drawn)
        places = [
            (index, place + 1)
            for index, place in places
            if rows[index].slot in following and _is_right(rows[index], place, draws[index][place])
        ]
    return [_output(row, of_row) for row, of_row in zip(rows, draws, strict=True)]


def _end_word(sampler: Sampler, logits: Logits, at: int, masks: dict[int, Mask], ending: Ending | None) -> None:
    """Ends an output in which the model has come to the end of a word after which no other word may be begun."""
    if ending is None:
        return
    best = sampler.best(logits, at, ending.open)
    if best >= 0 and not masks[at][best // 32] >> best % 32 & 1:
        masks[at] = ending.nearer


def _is_right(row: Row, place: int, drawn: Draw) -> bool:
    """Says whether there was a guess at this place, and it was drawn."""
    return place < row.num_drafts and drawn.token_id == row.token_ids[row.num_known + place]


def _guessed(drawn: Draw) -> Draw:
    """Returns the draw of a token that was guessed, with that in its explanation, where it has one."""
    if drawn.explanation is None:
        return drawn
    return drawn._replace(explanation=msgspec.structs.replace(drawn.explanation, guessed=True))


def _output(row: Row, draws: Sequence[Draw]) -> RowOutput:
    """Returns a row's output: its draws up to the first that no guess foresaw.

    The next step meets a failure after the first token first, and reports it.
    """
    if draws[0].error is not None:
        return RowOutput(error=draws[0].error)
    if row.num_drafts:
        num_right = next(place for place in count() if not _is_right(row, place, draws[place]))
        draws = [*map(_guessed, draws[:num_right]), draws[num_right]]
    token_ids = tuple([drawn.token_id for drawn in draws if drawn.token_id is not None])
    return RowOutput(
        token_ids,
        tuple([drawn.logprobs for drawn in draws if drawn.logprobs is not None]),
        explanations=tuple([drawn.explanation for drawn in draws if drawn.explanation is not None]),
    )
