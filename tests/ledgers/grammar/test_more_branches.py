"""Guards that have to count items themselves: more walks than in tests/grammar/test_guard_branches.py."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "grammar"))
import test_guard_branches
from test_guard_branches import no_states  # noqa: F401 - a fixture that every test here has

GUARDS = ("grammar",)


@pytest.mark.parametrize("size", test_guard_branches.VOCABULARIES)
@pytest.mark.parametrize("name", test_guard_branches.SMALL)
def test_more_walks_through_guarded_branches_have_exact_masks(name, size):
    test_guard_branches.check_tokens(name, size, times=12)
