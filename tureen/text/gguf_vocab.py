"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE, SentencePiece BPE, WordPiece and Unigram.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (tokenizer.ggml.*); llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tureen.errors import StartupError, echo
from tureen.text.pre_tokenizers import BOS_BY_DEFAULT, IGNORE_MERGES, NAMES, pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type."""
SPACE: Final = "▁"
MAX_TOKEN_CHARS: Final = 4096
"""Length limit of a token: finding its merges takes time quadratic in it. Real ones have up to some 500 characters."""
MAX_ADDED_CHARS: Final = 1 << 20
"""Total length limit of added tokens: the library needs 4 s for them, in which no signal is handled."""
_T = TypeVar("_T")

# Control tokens that end a turn or a document. GGUF files name one or two of them, but models produce the others too.
END_TEXTS: Final = frozenset(
    (
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endofprompt|>",
        "<｜end▁of▁sentence｜>",
    )
)
HARMONY_ENDS: Final = frozenset(("<|endoftext|>", "<|return|>", "<|call|>"))
"""Control tokens that end an output of gpt-oss, where <|end|> only ends a message."""
GEMMA4_ENDS: Final = frozenset(("<eos>", "<turn|>", "<|tool_response>"))
"""Tokens that end a text, a turn, or a call in the output of Gemma 4, whatever their types."""
NAMED_KEYS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
}
COMPOSED: Final = ("modern-bert", "qwen2", "qwen35")
"""Values of tokenizer.ggml.pre of models that were trained on text in Unicode's form NFC."""
SENTENCEPIECE: Final = ("llama", "gemma4")
"""Values of tokenizer.ggml.model. Files of the second kind list their merges."""
END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


def build_backend(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that `tokenizer.ggml.*` describes. Raises StartupError naming the key at fault."""
    model = _get(metadata, "model", str)
    tokens = _tokens(metadata)
    types = _numbers(metadata, "token_type", len(tokens))
    longest, added = max(map(len, tokens)), _added_tokens(tokens, types)
    if longest > MAX_TOKEN_CHARS:
        raise StartupError(
            f"tokenizer.ggml.tokens has one of {longest} characters; at most {MAX_TOKEN_CHARS} are taken"
        )
    if sum(len(token.content) for token in added) > MAX_ADDED_CHARS:
        raise StartupError(f"tokenizer.ggml.token_type marks special tokens of more than {MAX_ADDED_CHARS} characters")
    corrupt = "the tokenizer in the model's metadata is corrupt"
    with naming_faults(corrupt):
        if model in SENTENCEPIECE:
            backend = _sentencepiece(metadata, tokens, types)
        elif model == "gpt2":
            backend = _byte_level(metadata, tokens)
        elif model in ENCODERS:
            backend = ENCODERS[model](metadata, tokens, types)
        else:
            known = ", ".join(("gpt2", *SENTENCEPIECE, *ENCODERS))
            raise StartupError(f"tokenizer.ggml.model {echo(model)} is not known; these are: {known}")
        backend.add_tokens(added)
        if backend.get_vocab_size() != len(tokens):
            raise StartupError(f"{corrupt}: its tokens are not distinct")
        if model not in ENCODERS:
            _add_ends(backend, metadata, tokens)
    return backend


@contextmanager
def naming_faults(what: str) -> Iterator[None]:
    """Turn an error of the package tokenizers into a StartupError that begins with `what`.

    The package raises plain Exception. Where its Rust code panics, it raises a BaseException of a class that cannot be
    imported.
    """
    try:
        yield
    except StartupError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise StartupError(f"{what}: {echo(str(error))}") from None


def check_merges(vocab: Container[str], merges: Iterable[Sequence[str]], prefix: str = "") -> None:
    """Raise ValueError for a merge whose result is no token: the package tokenizers panics or aborts at some.

    prefix: mark of tokens that continue a word; the result has only the left token's.
    """
    for left, right in merges:
        if left + right.removeprefix(prefix) not in vocab or not right.startswith(prefix):
            raise ValueError(f"the merge of {echo(left)} and {echo(right)} makes no token")


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ids of the tokens that end an output: those the metadata names, and known control tokens."""
    tokens = _tokens(metadata)
    types = _numbers(metadata, "token_type", len(tokens))
    named = {token_id for key in END_KEYS if (token_id := special_id(metadata, key, len(tokens))) is not None}
    if str(metadata.get("tokenizer.ggml.model")) == "gemma4":
        return tuple(sorted(named | {token_id for token_id, text in enumerate(tokens) if text in GEMMA4_ENDS}))
    control = {text: token_id for token_id, text in enumerate(tokens) if types[token_id] == CONTROL}
    ends = HARMONY_ENDS if control.keys() >= HARMONY_ENDS else END_TEXTS
    known = {token_id for text, token_id in control.items() if text in ends}
    return tuple(sorted(named | known))


def special_id(metadata: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    """Returns the token id under `tokenizer.ggml.<key>`, or None. Raises StartupError for one outside the
    vocabulary."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise StartupError(f"tokenizer.ggml.{key} must be a token id below {num_tokens}, got {echo(value)}")
    return value


def named_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns name in chat templates, such as bos_token -> the token's text."""
    texts = dict(enumerate(_tokens(metadata)))
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in NAMED_KEYS.items()}
    return {name: texts[token_id] for name, token_id in ids.items() if token_id in texts}


# byte-level BPE (GPT-2 and later models)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = _get(metadata, "pre", str)
    if pre not in NAMES:
        raise StartupError(
            f"tokenizer.ggml.pre {echo(pre)} is not known; take the model's safetensors, or a newer version of tureen"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _listed_merges(metadata, vocab)
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in IGNORE_MERGES))
    backend.pre_tokenizer = pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend


def _listed_merges(metadata: Mapping[str, Any], vocab: Container[str]) -> list[tuple[str, str]]:
    """Returns the merges listed in the file. Raises StartupError, ValueError."""
    merges = []
    for merge in _get(metadata, "merges", list):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    check_merges(vocab, merges)
    return merges


# SentencePiece BPE (Llama 2, Mistral, Gemma)


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> Tokenizer:
    unknown_id = special_id(metadata, "unknown_token_id", len(tokens))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if metadata["tokenizer.ggml.model"] == "llama":
        merges = _merges(vocab, _numbers(metadata, "scores", len(tokens)), types)
    else:
        merges = _listed_merges(metadata, vocab)
    backend = Tokenizer(
        models.BPE(
            vocab,
            merges,
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _flag(metadata, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Returns the merges by which BPE does what SentencePiece does: join the neighbours that give the best-scored
    piece.

    The ways to make one piece are ordered by the ids of the parts, as in the tokenizer.json of Llama 2.
    """
    pieces = {token: i for token, i in vocab.items() if types[i] in (NORMAL, USER_DEFINED)}
    merges: list[tuple[str, str]] = []
    for piece, _ in sorted(pieces.items(), key=lambda item: (-scores[item[1]], item[1])):
        first = len(merges)
        for at in range(1, len(piece)):
            left = piece[:at]
            if left in pieces and (right := piece[at:]) in pieces:
                merges.append((left, right))
        if len(merges) - first > 1:
            merges[first:] = sorted(merges[first:], key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    return merges


# WordPiece and Unigram, of encoders


def _wordpiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> Tokenizer:
    """Builds BERT's tokenizer. The file has a mark before words where BERT's vocabulary has one before what continues a
    word; it does not say whether case counts, which the vocabulary tells."""
    vocab = {_bert_token(token, types[token_id]): token_id for token_id, token in enumerate(tokens)}
    first, last = _ends_of_encoder(metadata, tokens)
    unknown_id = special_id(metadata, "unknown_token_id", len(tokens))
    unknown = "[UNK]" if unknown_id is None else tokens[unknown_id]
    is_cased = any(token.startswith(SPACE) and token.lower() != token for token in tokens)
    backend = Tokenizer(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first[0]} $A {last[0]}",
        pair=f"{first[0]} $A {last[0]} $B:1 {last[0]}:1",
        special_tokens=[first, last],
    )
    return backend


def _bert_token(token: str, kind: int) -> str:
    if kind in (CONTROL, UNKNOWN, USER_DEFINED) or (token.startswith("[") and token.endswith("]")):
        return token
    return token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"


def _unigram(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> Tokenizer:
    """Builds XLM-RoBERTa's tokenizer (SentencePiece, arXiv:1804.10959)."""
    scores = _numbers(metadata, "scores", len(tokens))
    first, last = _ends_of_encoder(metadata, tokens)
    unknown_id = special_id(metadata, "unknown_token_id", len(tokens))
    backend = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown_id))
    steps: list[normalizers.Normalizer] = []
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None:
        steps.append(normalizers.Precompiled(np.asarray(charsmap).astype(np.uint8).tobytes()))
    if _flag(metadata, "remove_extra_whitespaces", True):
        steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    prefix = "always" if _flag(metadata, "add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=prefix)
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=prefix)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first[0]} $A {last[0]}",
        pair=f"{first[0]} $A {last[0]} {last[0]} $B {last[0]}",
        special_tokens=[first, last],
    )
    return backend


ENCODERS: Final = {"bert": _wordpiece, "t5": _unigram}
"""Values of tokenizer.ggml.model -> functions that build the tokenizer."""


def _ends_of_encoder(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[tuple[str, int], tuple[str, int]]:
    """Returns the tokens that begin and end a text, each with its id. Raises StartupError."""
    ends = []
    for keys in (("cls_token_id", "bos_token_id"), ("seperator_token_id", "eos_token_id")):
        token_id = next((i for key in keys if (i := special_id(metadata, key, len(tokens))) is not None), None)
        if token_id is None:
            raise StartupError(f"tokenizer.ggml.{keys[0]} is missing in the model's metadata")
        ends.append((tokens[token_id], token_id))
    return ends[0], ends[1]


# shared by all kinds


def _added_tokens(tokens: list[str], types: Sequence[int]) -> list[AddedToken]:
    return [
        AddedToken(text, special=kind != USER_DEFINED, normalized=False)
        for text, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and text
    ]


def _add_ends(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Makes the tokenizer add BOS and EOS as llama.cpp does for this file.

    Files with add_sep_token are of encoders: their EOS is the separator, and the second text of a pair has no BOS.
    """
    is_sentencepiece = metadata["tokenizer.ggml.model"] in SENTENCEPIECE
    bos_by_default = is_sentencepiece or _get(metadata, "pre", str) in BOS_BY_DEFAULT
    bos_id = special_id(metadata, "bos_token_id", len(tokens))
    eos_id = special_id(metadata, "eos_token_id", len(tokens))
    bos = bos_id if _flag(metadata, "add_bos_token", bos_by_default) else None
    eos = eos_id if _flag(metadata, "add_eos_token", False) else None
    if bos is not None or eos is not None:
        add_around(backend, bos, eos, separates=_flag(metadata, "add_sep_token", False))


def add_around(backend: Tokenizer, first: int | None, last: int | None, *, separates: bool = False) -> None:
    """Makes `encode(…, add_special_tokens=True)` put these tokens, and no others, around a text. separates: the second
    text of a pair has no `first`."""
    ids = {name: token_id for name, token_id in (("first", first), ("last", last)) if token_id is not None}

    def around(text: str, kind: int) -> list[str]:
        parts = (text, "last") if kind and separates else ("first", text, "last")
        return [f"{part}:{kind}" for part in parts if part == text or part in ids]

    backend.post_processor = processors.TemplateProcessing(
        single=around("$A", 0), pair=around("$A", 0) + around("$B", 1), special_tokens=list(ids.items())
    )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens: list[str] = _get(metadata, "tokens", list)
    if not tokens or not isinstance(tokens[0], str):
        raise StartupError("tokenizer.ggml.tokens must be a list of strings, not empty")
    return tokens


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, np.ndarray) or values.shape != (count,):
        raise StartupError(f"tokenizer.ggml.{key} must have one number for each of the {count} tokens")
    numbers: list[Any] = values.tolist()
    return numbers


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise StartupError(f"tokenizer.ggml.{key} must be true or false, got {echo(value)}")
    return value


def _get(metadata: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, kind):
        problem = "is missing" if value is None else f"must be a {kind.__name__}"
        raise StartupError(f"tokenizer.ggml.{key} {problem} in the model's metadata")
    return value
