"""An offline engine that cannot start leaves nothing behind."""

import pytest
from warm_structs import is_warm, new_struct

import tureen
from tureen import offline
from tureen.build import Model
from tureen.errors import StartupError


def _refuse(*_):
    raise StartupError("wrong settings")


class Client:
    info = None

    def __init__(self):
        self.num_closed = 0

    async def close(self):
        self.num_closed += 1


@pytest.fixture
def clients(monkeypatch):
    """Of engines that need no model."""
    made = []

    async def connect(*_, progress):
        made.append(Client())
        return made[-1]

    monkeypatch.setattr(offline, "find_model", lambda config, progress: Model(None, None))
    monkeypatch.setattr(offline, "connect", connect)
    monkeypatch.setattr(offline, "media_loader", lambda *_: None)
    return made


@pytest.mark.parametrize(("step", "num_connected"), [("media_loader", 0), ("make_context", 1)])
def test_an_engine_that_cannot_start_is_closed_or_was_never_begun(monkeypatch, clients, step, num_connected):
    monkeypatch.setattr(offline, step, _refuse)
    with pytest.raises(StartupError, match="wrong settings"):
        tureen.Engine()
    assert [one.num_closed for one in clients] == [1] * num_connected


def test_an_engine_takes_requests_once_no_two_threads_can_build_the_same_type(monkeypatch, clients):
    kind = new_struct()
    assert not is_warm(kind)
    monkeypatch.setattr(offline, "make_context", _refuse)
    with pytest.raises(StartupError):
        tureen.Engine()
    assert is_warm(kind)
