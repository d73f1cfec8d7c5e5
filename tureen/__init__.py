"""tureen, an LLM serving runtime."""

import os
import sys


def _is_started_by_module() -> bool:
    """Return whether `python -m` started this process with a module of tureen, or of its stand-in for sglang.

    `python -m` puts the current folder first on sys.path. That folder may be a downloaded model, with files that are
    named like modules.
    """
    if sys.flags.safe_path or not 0 < len(sys.argv) < len(sys.orig_argv):
        return False
    word = sys.orig_argv[-len(sys.argv)]  # MODULE, or the word that ends in -mMODULE
    module = word.partition("m")[2] if word.startswith("-") else word
    try:
        return module.partition(".")[0] in ("tureen", "sglang") and sys.path[0] == os.getcwd()
    except OSError:  # the current folder was deleted
        return False


if _is_started_by_module():
    del sys.path[0]

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from tureen.config import Config as Config
    from tureen.contract.params import SamplingParams as SamplingParams
    from tureen.offline import OfflineEngine as Engine

__version__ = "0.2.0"
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
