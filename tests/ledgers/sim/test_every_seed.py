"""The whole server simulated under every seed; the gate takes some of them (tests/sim/test_whole_server.py)."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "sim"))
from simulation import ROLES, Simulation

GUARDS = ("cache", "contract", "control", "dialects", "engine", "front", "http", "replicas", "requests", "serving")


@pytest.mark.parametrize("seed", range(300))
def test_every_answer_is_right_and_nothing_of_a_request_is_left(seed):
    Simulation(seed).run()


@pytest.mark.parametrize("replicated", range(200))
def test_every_answer_of_several_replicas_is_right(replicated):
    Simulation(replicated, num_replicas=2 + replicated % 2).run()


@pytest.mark.parametrize("roled", range(100))
def test_every_answer_of_replicas_that_have_roles_is_right(roled):
    roles = ROLES[roled % len(ROLES)]
    Simulation(roled, len(roles), roles).run()
