"""Looks in the source of the installed transformers for classes that --model-impl transformers may run.

Imports: extras.
Imported by: registry.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

from tureen.extras import is_installed

CAUSAL: Final = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = .*?^\)", re.DOTALL | re.MULTILINE)
PLAIN_ATTENTION: Final = "ALL_ATTENTION_FUNCTIONS"
"""Name by which layers of transformers take the attention of a server."""
SINKS: Final = "s_aux="
"""Argument of attention with sinks, which the attention here does not have."""


def advice(architecture: str) -> str:
    """Returns whether --model-impl transformers may run a model whose config.json names this architecture. Imports
    neither torch nor transformers."""
    if not is_installed("transformers"):
        return "--model-impl transformers may run it: pip install 'tureen[torch]', and try"
    if _has_plain_attention(architecture):
        return "try --model-impl transformers: it is slow, and the start compares it with transformers"
    return "--model-impl transformers cannot run it either; take a model of another architecture"


def _has_plain_attention(architecture: str) -> bool:
    """Returns whether the installed transformers has the class among its causal language models, with attention that
    can be replaced."""
    spec = importlib.util.find_spec("transformers")
    folders = [Path(folder, "models") for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        names = CAUSAL.search(_text(folder / "auto" / "modeling_auto.py"))
        if names is None or f'"{architecture}"' not in names[0]:
            continue
        head = f"class {architecture}("
        sources = (_text(path) for path in folder.glob("*/modeling_*.py"))
        return any(PLAIN_ATTENTION in source and SINKS not in source for source in sources if head in source)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
