"""Memory's speed is told with native kernels and without. How fast it is, is not for a test to say."""

import pytest

from tureen.bench import machine


@pytest.fixture
def little_to_read(monkeypatch):
    monkeypatch.setattr(machine, "DRAM_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "WEIGHTS_BYTES", 1 << 19)
    monkeypatch.setattr(machine, "PROBE_ROUNDS", 2)


def test_reads_are_measured_without_native_kernels(little_to_read, monkeypatch):
    monkeypatch.setattr(machine, "load", lambda: None)
    reads = machine.memory_reads()
    assert min(reads.dram_gb_s, reads.weights_gb_s) > 0


def test_reads_are_measured_by_native_kernels_where_there_are_any(little_to_read, monkeypatch):
    native = pytest.importorskip("tureen.kernels.cpu._native")
    asked = []

    class Watched:
        @staticmethod
        def read_bandwidth(*arguments):
            asked.append(arguments[1])
            return native.read_bandwidth(*arguments)

    monkeypatch.setattr(machine, "load", lambda: Watched)
    reads = machine.memory_reads()
    assert asked == [1 << 20, 1 << 19]
    assert min(reads.dram_gb_s, reads.weights_gb_s) > 0


@pytest.mark.parametrize("arguments", [(2, 1 << 20, 0), (2, 0, 1), (0, 1 << 20, 1), (1, -1, 1)])
def test_a_reading_of_nothing_is_refused(arguments):
    native = pytest.importorskip("tureen.kernels.cpu._native")
    with pytest.raises((ValueError, TypeError)):
        native.read_bandwidth(*arguments)
