"""The whole server simulated under some seeds: `python tests/sim/run.py SEED` shows one, `make soak-sim` runs more."""

import gc
from unittest import mock

import pytest
from samples import some
from simulation import ROLES, Simulation

FINDERS = (3, 7)
"""Seeds that find most mistakes quickly."""


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        one = metafunc.config.getoption("--sim-seed")
        metafunc.parametrize("seed", sorted({*FINDERS, *some(range(300), 14)}) if one is None else [one])


@pytest.mark.sampled
def test_whatever_happens_every_answer_is_right_and_nothing_is_left_of_anybody(seed):
    Simulation(seed).run()


@pytest.mark.sampled
@pytest.mark.parametrize("replicated", some(range(200), 10))
def test_so_it_is_with_several_replicas(replicated):
    Simulation(replicated, num_replicas=2 + replicated % 2).run()


@pytest.mark.sampled
@pytest.mark.parametrize("roles", ROLES, ids="-".join)
@pytest.mark.parametrize("roled", some(range(34), 3))
def test_so_it_is_with_replicas_that_have_roles(roled, roles):
    Simulation(roled, len(roles), roles).run()


def test_one_seed_is_one_history():
    first, again = Simulation(7).run(), Simulation(7).run()
    assert len(first.loop.trace) > 10
    assert (first.loop.trace, first.tally.__dict__) == (again.loop.trace, again.tally.__dict__)


def _is_found(patch) -> bool:
    with patch:
        found = any(not _goes_well(seed) for seed in (*FINDERS, *range(100)))
        gc.collect()  # what was left in the middle ends here, and complains
    return found


def _goes_well(seed) -> bool:
    try:
        Simulation(seed).run()
    except Exception:  # noqa: BLE001 - how it shows is of no interest
        return False
    return True


def _never(*_args, **_more):
    return None


MISTAKES = {
    "aborts are lost": lambda: mock.patch("tureen.engine.engine.Engine.abort", _never),
    "a turn of a session is never ended": lambda: mock.patch("tureen.sessions.sessions.Turn.end", _never),
    "names are never given back": lambda: mock.patch("tureen.requests.state.ServerState.leave", _never),
    "recordings are never forgotten": lambda: mock.patch(
        "tureen.recordings.recording.Recordings._is_kept", return_value=True
    ),
    "recordings are forgotten at once": lambda: mock.patch(
        "tureen.recordings.recording.Recordings._is_kept", return_value=False
    ),
    "pages are not given back": lambda: mock.patch("tureen.cache.manager.CacheManager.close", _never),
    "finishes are not counted": lambda: mock.patch("tureen.metrics.Metrics.count_finish", _never),
    "tokens are not counted": lambda: mock.patch("tureen.requests.generation.Meter.note", _never),
    "what a lost engine had is not taken to the next": lambda: mock.patch("tureen.serving.streams.Streams.cut", _never),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it is left in the middle
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_any_part_is_found_by_some_seed(mistake):
    assert _is_found(MISTAKES[mistake]())
