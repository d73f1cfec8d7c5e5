"""A tokenizer for tests without a model: token id = byte, then EOS and BOS."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tureen.text.tokenizer import BYTE_OF_CHAR, Tokenizer

EOS, BOS = 256, 257
VOCAB_SIZE = 258


def make_byte_tokenizer(*special: str) -> Tokenizer:
    """With more special tokens, whose ids a model of VOCAB_SIZE does not have."""
    backend = Backend(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", "<bos>", *special)])
    return Tokenizer(backend, eos_token_ids=(EOS,), bos_token_id=BOS)
