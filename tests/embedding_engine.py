"""An engine of a model that makes embeddings, which counts letters; for `App(factory=…)`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer

from tureen.config import Config
from tureen.contract.runner import TextToEmbed
from tureen.contract.types import EngineInfo
from tureen.engine.embedding import EmbeddingEngine
from tureen.log import Progress

MAX_TOKENS = 16


class LetterCounts:
    """Of each of four letters, how often it stands in the text."""

    def embed(self, texts: Sequence[TextToEmbed]) -> list[bytes]:
        counts = ((float(list(text.token_ids).count(ord(letter))) for letter in "abcd") for text in texts)
        return [struct.pack("<4f", *own) for own in counts]


def make_embedding_engine(config: Config, *, progress: Progress) -> tuple[EmbeddingEngine, EngineInfo]:
    engine = EmbeddingEngine(
        LetterCounts(),
        make_byte_tokenizer(),
        max_tokens=MAX_TOKENS,
        max_queued=config.max_queued_requests,
        token_budget=8,
    )
    info = EngineInfo(
        model_path="fake",
        model_name="fake-embedder",
        architecture="FakeEmbedder",
        model_type="fake",
        device="fake",
        dtype="none",
        vocab_size=VOCAB_SIZE,
        context_len=MAX_TOKENS,
        max_total_tokens=MAX_TOKENS,
        page_size=1,
        hidden_size=4,
        kv_bytes_per_token=0,
        max_running_requests=1,
        eos_token_ids=(),
        pooling="mean",
    )
    return engine, info
