import os
import subprocess
import sys

import pytest
import torch

from tureen.devices import base, cgroups, cpu, cuda, dtypes
from tureen.devices.base import resolve_device
from tureen.devices.dtypes import default_dtype
from tureen.errors import StartupError


def test_auto_takes_cuda_where_there_is_one():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cpu_facts_are_plausible():
    device = resolve_device("cpu")
    assert 1 <= device.num_threads <= len(os.sched_getaffinity(0))
    assert default_dtype(device) in (torch.bfloat16, torch.float32)
    assert 1 << 20 < device.free_bytes() < 1 << 45
    assert resolve_device("cpu", 1).num_threads == 1


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        ("25000 50000", 1),
        (None, 8),
    ],
)
def test_there_are_as_many_threads_as_processors_that_the_control_group_grants(tmp_path, monkeypatch, quota, threads):
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "missing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert cpu.num_threads() == threads


def test_torch_is_asked_for_cuda_only_where_there_is_a_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "GPU_TRACES", (str(tmp_path / "driver"),))
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cpu"
    (tmp_path / "driver").touch()
    assert resolve_device("auto").type == "cuda"


@pytest.mark.parametrize(
    ("onednn", "instructions", "limit", "dtype"),
    [
        (True, True, "", torch.bfloat16),
        (True, True, "AVX512_CORE_BF16", torch.bfloat16),
        (True, True, "avx512_core_vnni", torch.float32),
        (True, True, "AVX512_CORE", torch.float32),
        (True, False, "", torch.float32),  # AVX-512 alone: oneDNN has bfloat16, by way of float32
        (False, True, "AVX2", torch.float32),
    ],
)
def test_bfloat16_is_the_default_where_the_processor_multiplies_it(monkeypatch, onednn, instructions, limit, dtype):
    monkeypatch.setattr(dtypes.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(dtypes, "has_onednn_bfloat16", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert default_dtype(resolve_device("cpu")) is dtype


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
