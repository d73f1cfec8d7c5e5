"""An offline engine that cannot start leaves nothing behind."""

import pytest

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


@pytest.mark.parametrize(("step", "num_connected"), [("media_loader", 0), ("make_context", 1)])
def test_an_engine_that_cannot_start_is_closed_or_was_never_begun(monkeypatch, step, num_connected):
    clients = []

    async def connect(*_, progress):
        clients.append(Client())
        return clients[-1]

    monkeypatch.setattr(offline, "find_model", lambda config, progress: Model(None, None))
    monkeypatch.setattr(offline, "connect", connect)
    monkeypatch.setattr(offline, "media_loader", lambda *_: None)
    monkeypatch.setattr(offline, step, _refuse)
    with pytest.raises(StartupError, match="wrong settings"):
        tureen.Engine()
    assert [one.num_closed for one in clients] == [1] * num_connected
