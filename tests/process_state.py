"""What a test shares with those after it in the same process."""

from __future__ import annotations

import builtins
import logging
import os
import sys
from typing import Any

OF_IMPORTS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that pytest changes, or torch sets when its compiler is imported, always to the same."""


SET_BY_THE_PRODUCT = ("torch.get_num_threads()", "logging.getLogger().handlers", "the level of tureen's log", "print")
"""torch, commands and Ray set these for the process. They are restored, and the test does not fail."""

LOG = logging.getLogger("tureen")


def read() -> dict[str, Any]:
    """torch's only where it has been imported: a test that imports it may not change them either."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_IMPORTS}
    state: dict[str, Any] = {f"os.environ[{name!r}]": value for name, value in kept.items()}
    state["os.getcwd()"] = os.getcwd()
    state["logging.getLogger().handlers"] = tuple(logging.getLogger().handlers)
    state["the level of tureen's log"] = LOG.level
    state["print"] = builtins.print
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_default_dtype"):
        state["torch.get_num_threads()"] = torch.get_num_threads()
        state["torch.get_default_dtype()"] = torch.get_default_dtype()
        state["torch.is_grad_enabled()"] = torch.is_grad_enabled()
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each; what torch's import brought is none."""
    names = [name for name in {**before, **after} if name in before or not name.startswith("torch.")]
    return [
        f"{name}: {before.get(name, 'nothing')} before, {after.get(name, 'nothing')} after"
        for name in sorted(names)
        if before.get(name) != after.get(name) and name not in SET_BY_THE_PRODUCT
    ]


def restore(before: dict[str, Any]) -> None:
    """What can be: so that only the test that changed it fails."""
    wanted = {name[12:-2]: value for name, value in before.items() if name.startswith("os.environ[")}
    for name in os.environ.keys() - wanted.keys() - set(OF_IMPORTS):
        del os.environ[name]
    os.environ.update(wanted)
    os.chdir(before["os.getcwd()"])
    logging.getLogger().handlers[:] = before["logging.getLogger().handlers"]
    LOG.setLevel(before["the level of tureen's log"])
    builtins.print = before["print"]
    torch = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(before.get("torch.get_num_threads()", int(os.environ["OMP_NUM_THREADS"])))
    if "torch.get_default_dtype()" in before:
        torch.set_default_dtype(before["torch.get_default_dtype()"])
        torch.set_grad_enabled(before["torch.is_grad_enabled()"])
