"""What a sequence repeats is found as a search of all its tokens finds it."""

from __future__ import annotations

import random

import pytest

from tureen.kernels.cpu import native

kernels = native.load()
pytestmark = pytest.mark.skipif(kernels is None, reason="no native kernels")


def searched(tokens, most):
    """What followed the last earlier occurrence of the last three tokens, or else of the last two."""
    for length in (3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                match = next((n for n in range(32) if n == end or tokens[end - 1 - n] != tokens[-1 - n]), 32)
                repeated = tokens[end:]
                return [repeated[i % len(repeated)] for i in range(most)], match
    return [], 0


@pytest.mark.parametrize("num_tokens", [2, 8, 900, 150_000])
def test_what_followed_the_last_three_or_two_tokens_is_found(num_tokens):
    dice, history, tokens = random.Random(num_tokens), kernels.History(), []
    num_found = 0
    for _ in range(400):
        coming = [dice.randrange(num_tokens) for _ in range(dice.choice((1, 1, 1, 7)))]
        if dice.random() < 0.2 and tokens:  # a passage again
            start = dice.randrange(len(tokens))
            coming = tokens[start : start + 40]
        tokens += coming
        history.append(coming)
        assert len(history) == len(tokens)
        most = dice.randrange(1, 20)
        assert history.look_up(most) == searched(tokens, most), tokens
        num_found += bool(history.look_up(1)[1])
    assert num_found > 50


def test_a_long_prompt_that_is_appended_at_once_is_known_whole():
    tokens = [random.Random(1).randrange(50_000) for _ in range(70_000)]
    history = kernels.History()
    history.append([*tokens, *tokens[40_000:40_050]])
    assert history.look_up(16) == (tokens[40_050:40_066], 32)


def test_the_end_of_a_run_of_one_token_repeats_it():
    history = kernels.History()
    history.append([5] * 9)
    assert history.look_up(4) == ([5] * 4, 8)
    history.append([6])
    assert history.look_up(4) == ([], 0)
