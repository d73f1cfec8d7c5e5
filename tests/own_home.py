"""A home of its own with a small model in its cache, for commands about models."""

from __future__ import annotations

from pathlib import Path

import tiny_gguf
import tiny_models


def make(home: Path) -> tuple[dict[str, str], Path]:
    """Return the environment variables of the home, and the path of the model."""
    folder = home / "cache" / "tureen" / "mine"
    folder.mkdir(parents=True)
    model = tiny_models.write(home / "hf", "llama")
    path = tiny_gguf.write_from_transformers(folder / "tiny.gguf", model)
    (home / "run").mkdir()
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "XDG_RUNTIME_DIR": str(home / "run")}
    return own, path
