"""Shows in answers why each token was chosen, and which weights drew it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from tureen.contract.types import Explanation, StageView
from tureen.requests.generation import Output
from tureen.requests.state import Context


def rendered(explanations: Sequence[Explanation], context: Context) -> list[dict[str, Any]]:
    """Returns the explanations in the form of all APIs' answers. Token texts are as in log-probabilities."""
    return [_shown(explanation, context) for explanation in explanations]


class Explained:
    """The explanations of a growing output. Each is returned once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_given = 0

    def new(self, output: Output) -> dict[str, Any]:
        """Returns the field with the explanations of the tokens since the last call; {} if the request asks for
        none."""
        if not output.request.explain:
            return {}
        explanations = output.remarks.explanations[self._num_given : len(output.token_ids)]
        self._num_given += len(explanations)
        return {"explanations": rendered(explanations, self._context)}


def joined_explanations(outputs: Sequence[Output], explained: Sequence[Explained]) -> dict[str, Any]:
    """Returns the field with the new explanations of all outputs, for an answer with one place for all of them."""
    fields = [each.new(output) for each, output in zip(explained, outputs, strict=True)]
    return {"explanations": [field["explanations"] for field in fields]} if any(fields) else {}


def _shown(explanation: Explanation, context: Context) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "token_id": explanation.token_id,
        "text": context.tokenizer.token_text(explanation.token_id),
        "position": explanation.position,
        "chosen_by": explanation.chosen_by,
        "guessed": explanation.guessed,
        "random": explanation.random,
    }
    if explanation.candidates:
        shown["candidates"] = _texts(explanation.candidates, context)
        shown["stages"] = list(map(_stage, explanation.stages))
    return shown


def _texts(token_ids: Iterable[int], context: Context) -> list[dict[str, Any]]:
    return [{"token_id": token_id, "text": context.tokenizer.token_text(token_id)} for token_id in token_ids]


def _stage(stage: StageView) -> dict[str, Any]:
    """Returns a stage without its unset fields."""
    fields: dict[str, Any] = {"stage": stage.name}
    if stage.value is not None:
        fields["value"] = stage.value
    if stage.num_kept is not None:
        fields["kept"] = stage.num_kept
    if stage.logits:
        fields["logits"] = stage.logits
    fields["probabilities"] = stage.probabilities
    return fields | ({"starts": stage.starts, "ends": stage.ends} if stage.starts else {})


def version_ranges(output: Output) -> list[dict[str, Any]]:
    """Returns the range of tokens of each version, as answers show it."""
    ends = accumulate(count for _, count in output.versions)
    spans = zip(output.versions, ends, strict=True)
    return [{"version": version, "start": end - count, "end": end} for (version, count), end in spans if count]
