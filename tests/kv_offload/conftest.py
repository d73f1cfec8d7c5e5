"""Disks as fast as the tests want."""

from __future__ import annotations

import threading

import pytest
from patient_disk import wait_for_disks
from timeouts import PATIENCE_S

from tureen.kv_offload import disk_thread


@pytest.fixture(autouse=True)
def no_pace(monkeypatch):
    """No disk is too slow."""
    wait_for_disks(monkeypatch)


class HungDisk:
    """Blocks one call of a world's disk, and the calls after it, until the test releases them."""

    def __init__(self, world, call, monkeypatch):
        self.has_begun, self.answers = threading.Event(), threading.Event()
        self._world, self._monkeypatch = world, monkeypatch
        real = getattr(world.tier._files, call)

        def hang(*args):
            if not self.answers.is_set():
                disk_thread.STUCK_S = 0.01
                self.has_begun.set()
                self.answers.wait()
            return real(*args)

        monkeypatch.setattr(world.tier._files, call, hang)

    def answer(self):
        """Returns when all that waited for the disk is done."""
        self.answers.set()
        for thread in (self._world.tier._looking, self._world.tier._loading, self._world.tier._saving):
            assert thread.mark().wait(PATIENCE_S)
        self._monkeypatch.setattr(disk_thread, "STUCK_S", PATIENCE_S)


@pytest.fixture
def hung_disk(monkeypatch):
    """Makes disks hang; at the end of the test they answer."""
    hung = []

    def hang(world, call):
        hung.append(HungDisk(world, call, monkeypatch))
        return hung[-1]

    yield hang
    for each in hung:
        each.answers.set()
