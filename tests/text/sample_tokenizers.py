"""Small tokenizers of each build, all of which know the tokens of the sample templates."""

from __future__ import annotations

from template_samples import NAMED, ORDINARY, SPECIAL
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tureen.text.tokenizer import BYTE_OF_CHAR, Tokenizer

SPACE = "▁"


def make_byte_level(**flags) -> Tokenizer:
    """Merges make pieces of control tokens' texts too. flags: of the special tokens."""
    vocab = dict(BYTE_OF_CHAR)
    merges = [("<", "|"), ("|", ">"), ("i", "m"), ("e", "n"), ("en", "d"), ("im", "_"), ("im_", "end"), ("h", "e")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, **flags)


def make_sentencepiece() -> Tokenizer:
    """As that of Llama 2: a space before the text, spaces as letters, bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE]
    pieces += [chr(code) for code in range(33, 127)] + ["en", "end", "im", f"{SPACE}a", "<s", "</"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("e", "n"), ("en", "d"), ("i", "m"), (SPACE, "a"), ("<", "s"), ("<", "/")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(backend)


def make_metaspace() -> Tokenizer:
    """A space before the text's first word only."""
    tokenizer = make_sentencepiece()
    backend = Backend(tokenizer.backend.model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    backend.decoder = tokenizer.backend.decoder
    return _finished(backend)


def _finished(backend: Backend, **flags) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False, **flags) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ORDINARY])
    eos, bos = backend.token_to_id("</s>"), backend.token_to_id("<s>")
    return Tokenizer(backend, eos_token_ids=(eos,), bos_token_id=bos, named_tokens=NAMED)


MAKERS = {
    "byte-level": make_byte_level,
    "stripping": lambda: make_byte_level(lstrip=True, rstrip=True),
    "sentencepiece": make_sentencepiece,
    "metaspace": make_metaspace,
}
