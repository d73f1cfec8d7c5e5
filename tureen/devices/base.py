"""The device that an engine runs on: which one, its default dtype, its free memory."""

from __future__ import annotations

import msgspec
import torch

from tureen.devices import cpu, cuda
from tureen.errors import StartupError


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device that is there."""

    type: str  # cpu or cuda
    name: str  # as torch writes it: cpu, cuda:0
    default_dtype: torch.dtype
    num_threads: int  # CPU threads for tensor operations

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.name)

    def free_bytes(self) -> int:
        """Memory that new tensors may take, now."""
        return cuda.free_bytes() if self.type == "cuda" else cpu.free_bytes()


def resolve_device(device: str, num_threads: int | None = None) -> DeviceInfo:
    """`auto` = cuda where there is one. Raises StartupError when the device asked for is not there."""
    threads = num_threads or cpu.num_threads()
    if device == "auto":
        device = "cuda" if cuda.is_available() else "cpu"
    if device == "cpu":
        return DeviceInfo("cpu", "cpu", cpu.default_dtype(), threads)
    if device != "cuda":
        raise StartupError(f"--device {device}: unknown; use auto, cpu or cuda", field="device")
    if not cuda.is_available():
        build = "has no CUDA support" if torch.version.cuda is None else "finds no usable GPU"
        raise StartupError(
            f"--device cuda: torch {torch.__version__} {build}; use --device cpu, or install a CUDA build of torch "
            "and check that nvidia-smi lists a GPU",
            field="device",
        )
    return DeviceInfo("cuda", "cuda:0", cuda.default_dtype(), threads)
