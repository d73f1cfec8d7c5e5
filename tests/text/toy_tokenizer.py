"""A byte-level tokenizer of 256 bytes, a few longer pieces (some cut inside characters) and special tokens."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from tureen.text.tokenizer import BYTE_OF_CHAR, Tokenizer

CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
PIECES = [bytes([byte]) for byte in range(256)] + [
    b"ab", b"abc", b"bab", b" the", b"\n\n", b"aaaa", b"stop", b"\xe6\x97", b"\xa5b", b"\xf0\x9f\x98", b"\x80\xc3",
]  # fmt: skip
SPECIALS = ["<|im_end|>", "<s>"]
IM_END, BOS = len(PIECES), len(PIECES) + 1


def make_toy_tokenizer() -> Tokenizer:
    vocab = {"".join(CHAR_OF_BYTE[byte] for byte in piece): token_id for token_id, piece in enumerate(PIECES)}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return Tokenizer(backend, eos_token_ids=(IM_END,), bos_token_id=BOS)
