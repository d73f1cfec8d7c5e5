"""The device that an engine runs on: which one, its free memory, its threads. Imports torch only where it is needed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec

from tureen.devices import cpu
from tureen.errors import StartupError
from tureen.extras import is_installed, require
from tureen.log import get_logger

log = get_logger("devices")

GPU_TRACES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/dev/kfd")


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device that is there, as `resolve_device` found it."""

    type: str  # cpu or cuda
    name: str  # as torch writes it: cpu, cuda:0
    num_threads: int  # CPU threads for tensor operations

    def free_bytes(self) -> int:
        """Returns the bytes of memory that new tensors may take now."""
        free: int = _cuda().free_bytes() if self.type == "cuda" else cpu.free_bytes()
        return free


def may_have_cuda() -> bool:
    """Says whether there are a CUDA driver and torch, so that it is worth importing torch to ask for the device."""
    return is_installed("torch") and _has_gpu_traces()


def _has_gpu_traces() -> bool:
    return any(Path(trace).exists() for trace in GPU_TRACES)


def resolve_device(device: str, num_threads: int | None = None) -> DeviceInfo:
    """Finds the device of this name; `auto` = cuda where there is one.

    num_threads: CPU threads to use; None = as many as this process may have. Raises StartupError when the device is not
    there.
    """
    threads = num_threads or cpu.num_threads()
    if device == "auto":
        if _has_gpu_traces() and not is_installed("torch"):
            log.warning("this machine has a GPU driver, but no package that can use it: pip install 'tureen[torch]'")
        device = "cuda" if may_have_cuda() and _cuda().is_available() else "cpu"
    if device == "cpu":
        return DeviceInfo("cpu", "cpu", threads)
    if device != "cuda":
        raise StartupError(f"--device {device}: unknown; use auto, cpu or cuda", field="device")
    if not _cuda().is_available():
        raise StartupError(
            f"--device cuda: {_cuda().why_not()}; use --device cpu, or install a CUDA build of torch and check that "
            "nvidia-smi lists a GPU",
            field="device",
        )
    return DeviceInfo("cuda", "cuda:0", threads)


def _cuda() -> Any:
    require("--device cuda", "torch", field="device")
    return importlib.import_module("tureen.devices.cuda")
