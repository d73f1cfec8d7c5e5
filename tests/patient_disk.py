"""No disk of --kv-disk is too slow, however busy the machine is."""

from __future__ import annotations

import pytest
from timeouts import PATIENCE_S

from tureen.kv_offload import disk, disk_thread


def wait_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_thread, "STUCK_S", PATIENCE_S)
    monkeypatch.setattr(disk, "LOOK_S", PATIENCE_S)
    monkeypatch.setattr(disk, "CLOSE_S", PATIENCE_S)
