"""The files of sentence-transformers beside a tiny model, and tokenizers with the special tokens of such models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

SEP = VOCAB_SIZE
"""The id of a token between two texts, the first one that the byte tokenizer does not have."""


def write_modules(folder: Path, *stages: str, pooling: dict[str, Any] | None = None, **files: Any) -> None:
    """Write modules.json with these stages. `files`: further JSON files by their names without .json."""
    modules = [{"type": f"sentence_transformers.models.{one}", "path": f"{n}_{one}"} for n, one in enumerate(stages)]
    (folder / "modules.json").write_text(json.dumps(modules))
    for n, stage in enumerate(stages):
        if stage == "Pooling":
            (folder / f"{n}_Pooling").mkdir(exist_ok=True)
            (folder / f"{n}_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def write_appending_tokenizer(folder: Path, *special: str) -> Tokenizer:
    """Write and return a byte tokenizer that appends EOS, as Qwen3-Embedding's does."""
    return _write(folder, "$A <eos>", "$A $B <eos>", [("<eos>", EOS)], *special)


def write_pair_tokenizer(folder: Path) -> Tokenizer:
    """Write and return a byte tokenizer that puts texts into BERT's form: [CLS] a [SEP] b [SEP], of two types."""
    special = [("<bos>", EOS + 1), ("<sep>", SEP)]
    return _write(folder, "<bos> $A <sep>", "<bos> $A <sep> $B:1 <sep>:1", special, "<sep>")


def _write(folder: Path, single: str, pair: str, special: list[tuple[str, int]], *more: str) -> Tokenizer:
    backend = make_byte_tokenizer(*more).backend
    backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))
    return backend


def change_config(folder: Path, **changes: Any) -> None:
    """Replace keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
