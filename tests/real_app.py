"""The application over a tiny real model, with the engine in a thread or in a process."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import httpx
import torch
from app_under_test import LOCAL, App
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from tiny_models import spread, write

from tureen import build
from tureen.config import Config
from tureen.front.app import build_app

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "grammar_backend": "none",
    "page_size": 4,
    "max_total_tokens": 4096,
    "num_threads": 1,
    "log_level": "error",
}


def write_model(folder: Path, seed: int, variant: str = "llama", **more: object) -> torch.nn.Module:
    """A model of bytes with its tokenizer; the oracle with the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "bos_token_id": BOS}
        model = write(folder, variant, **(facts | more))
        torch.manual_seed(seed)
        spread(model)
        model.save_pretrained(folder)
    make_byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    return model


class RealApp(App):
    def __init__(self, folder: Path, **settings: object) -> None:
        self.config = Config(model_path=str(folder), **(SETTINGS | settings))
        self._runner = asyncio.Runner()
        model = build.find_model(self.config)
        self.client = self.run(build.connect(self.config, model))
        self.app = build_app(self.client, model.tokenizer, self.config)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=LOCAL)
