"""Run by the server's Python: writes the default model's tokenizer as a folder that transformers reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tureen import config, config_sources
from tureen.weights.source import load_tokenizer, resolve_model


def main(folder: Path) -> None:
    cache_dir = Path(config_sources.load({}).download_dir or "~/.cache/tureen").expanduser()
    tokenizer = load_tokenizer(resolve_model(config.DEFAULT_MODEL, cache_dir=cache_dir))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.token_text(tokenizer.eos_token_ids[0]),
        "bos_token": tokenizer.token_text(tokenizer.bos_token_id),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
