"""tureen, an LLM serving runtime."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tureen.config import Config as Config
    from tureen.contract.params import SamplingParams as SamplingParams
    from tureen.offline import OfflineEngine as Engine

__version__ = "0.1.0"
__all__ = ["Config", "Engine", "SamplingParams", "__version__"]

_HOMES = {
    "Engine": ("tureen.offline", "OfflineEngine"),
    "Config": ("tureen.config", "Config"),
    "SamplingParams": ("tureen.contract.params", "SamplingParams"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `import tureen` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tureen' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
