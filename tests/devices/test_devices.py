import os
import subprocess
import sys

import pytest
import torch

from tureen.devices import cpu
from tureen.devices.base import resolve_device
from tureen.errors import StartupError


def test_auto_takes_cuda_where_there_is_one():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cpu_facts_are_plausible():
    device = resolve_device("cpu")
    assert device.num_threads == len(os.sched_getaffinity(0))
    assert device.default_dtype in (torch.bfloat16, torch.float32)
    assert 1 << 20 < device.free_bytes() < 1 << 45
    assert resolve_device("cpu", 1).num_threads == 1


def test_a_control_group_limits_free_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    assert cpu.free_bytes() == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu.free_bytes() > 1 << 20


def test_an_unknown_device_is_refused():
    with pytest.raises(StartupError, match="--device tpu"):
        resolve_device("tpu")


def test_what_must_precede_torch_does_not_import_it():
    code = (
        "import sys, os; from tureen.devices.threads import wait_politely; wait_politely();"
        "assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert int(run.stdout) > 0
