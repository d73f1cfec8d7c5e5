"""The real engine with the fake runner under random load: books after every step, answers at the end."""

import pytest
from world import World, make_request, random_tokens, simulate


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(60))
def test_any_interleaving_answers_as_if_alone_and_leaves_nothing_behind(page_size, seed):
    simulate(seed, page_size=page_size).check_answers()
