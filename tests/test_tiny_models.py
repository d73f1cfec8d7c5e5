from types import SimpleNamespace

import pytest
import torch
from tiny_models import greedy

VOCAB = 50


class Counting:
    """A model that writes each token once more than the one before it, and notes how often it was asked."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, token_ids, logits_to_keep):
        self.num_calls += 1
        return SimpleNamespace(logits=torch.nn.functional.one_hot((token_ids + 1) % VOCAB, VOCAB).float())


@pytest.mark.parametrize(
    ("draft", "num_calls"),
    [
        ([], 6),
        ([4, 5, 6, 7, 8, 9], 1),
        ([4, 5, 6, 7, 8, 9, 10, 11], 1),
        ([4, 5, 6], 3),
        ([9, 5, 6, 7, 8, 9], 2),
        ([4, 5, 9, 7, 8, 9], 2),
        ([0, 0, 0, 0, 0, 0], 6),
    ],
)
def test_a_draft_spares_work_and_changes_nothing(draft, num_calls):
    model = Counting()
    assert greedy(model, [1, 2, 3], 6, draft=draft) == [4, 5, 6, 7, 8, 9]
    assert model.num_calls == num_calls


def test_a_text_that_is_no_clear_choice_is_refused_with_the_place():
    with pytest.raises(ValueError, match="token 0"):
        greedy(Counting(), [1], 2, clear=2.0)
