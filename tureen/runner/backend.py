"""Decides whether native kernels, torch or ranks compute a model."""

from __future__ import annotations

from tureen.attention.choice import AUTO, NATIVE
from tureen.config import Config
from tureen.config_facts import has_ranks
from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError
from tureen.kernels.cpu import native


def uses_ranks(config: Config) -> bool:
    """Returns whether ranks compute the model: several processes, or one that adds in the order of several."""
    return has_ranks(config) or config.kernels == "tree"


def uses_native(config: Config, device: DeviceInfo) -> bool:
    """Returns whether native kernels compute a model in one process. Raises StartupError when they are asked for and
    cannot be had."""
    if config.kernels == "torch" and config.attention_backend != NATIVE:
        return False
    fault = native_fault(config, device)
    if config.kernels == "native" and fault:
        raise StartupError(f"--kernels native: {fault}", field="kernels")
    if config.attention_backend == NATIVE and (fault or config.kernels == "torch"):
        why = fault or "--kernels torch does not have it; leave one of the two out"
        raise StartupError(f"--attention-backend native: {why}", field="attention_backend")
    return not fault


def native_fault(config: Config, device: DeviceInfo) -> str:
    """Returns the reason why the native kernels cannot be used; empty when they can. Raises StartupError when they are
    there but fail."""
    return _attention_fault(config) or _device_fault(config, device)


def _attention_fault(config: Config) -> str:
    """Returns why the native kernels cannot be used with the chosen attention backend; empty if they can."""
    if config.attention_backend in (AUTO, NATIVE):
        return ""
    return (
        f"they have their own attention, not --attention-backend {config.attention_backend}; leave one of the two out"
    )


def _device_fault(config: Config, device: DeviceInfo) -> str:
    if device.type != "cpu":
        return f"they run on a CPU, not on {device.name}; use --device cpu"
    if config.dtype == "float16":
        return "they have no float16; use --dtype auto, bfloat16 or float32"
    try:
        return native.MISSING if native.load() is None else ""
    except (ImportError, RuntimeError) as error:
        raise StartupError(
            f"the native CPU kernels cannot run: {error}; use --kernels torch", field="kernels"
        ) from None
