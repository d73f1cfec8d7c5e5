"""The application over a tiny real model."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec
import torch
from app_under_test import App, ThreadedApp
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from inline_compiler import InlineCompiler
from tiny_models import spread, write

from tureen import build
from tureen.config import Config
from tureen.contract.types import EngineInfo
from tureen.engine.loop import SteppedEngine
from tureen.log import Progress
from tureen.serving.healing import HealingClient

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
    """With the engine on the event loop."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.config = Config(model_path=str(folder), **(SETTINGS | settings))
        self._begin()
        model = build.find_model(self.config)
        self.client = self.run(self._connect_model(model))
        self._serve(model.tokenizer, build.media_loader(self.config, model))

    async def _connect_model(self, model: build.Model) -> HealingClient:
        return await self._connect(lambda report: self._make_engine(model, report))

    def _make_engine(self, model: build.Model, report: Progress) -> tuple[SteppedEngine, EngineInfo]:
        """A compiler of grammars that needs no process takes the place of the real one."""
        config = msgspec.structs.replace(self.config, grammar_backend="none")
        engine, info = build.make_engine(config, model=model, progress=report)
        if self.config.grammar_backend != "none":
            engine.preparing.grammars._compiler = InlineCompiler()  # type: ignore[attr-defined]
        return engine, info


class RealThreadedApp(ThreadedApp, RealApp):
    """With the engine in a thread or a process, on the real clock."""

    async def _connect_model(self, model: build.Model) -> HealingClient:
        return await build.connect(self.config, model)
