"""Encodes text to token ids and decodes them, with a tokenizer of a Hugging Face folder or of GGUF metadata. Each token
has fixed bytes in running text, so outputs can be streamed."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder

from tureen.errors import InvalidRequest, StartupError, echo
from tureen.files import read_regular, read_text
from tureen.text import gguf_vocab

BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2}|\\+[0-9A-Fa-f])>")
"""A byte token such as <0x0A>; the library's parser allows a sign in the number, too."""
MAX_FILE_BYTES: Final = 128 << 20  # of tokenizer.json; the largest have some 35 MB
ANCHOR: Final = "a"  # a token put before another, so that a decoder treats that one as running text
DECODERS: Final = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")


class _Bpe(msgspec.Struct):
    """The part of a tokenizer.json that says how BPE merges."""

    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]
    continuing_subword_prefix: str | None = None


class _AddedToken(msgspec.Struct):
    """An entry of `added_tokens`, which the library reads slowly."""

    content: str


class _TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that are checked here."""

    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw()


class Tokenizer:
    """A tokenizer. Thread-safe. `vocab_size` is the tokenizer's own; a model's may be larger."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        max_token_chars: int | None = None,
    ) -> None:
        """`max_token_chars`: length of the vocabulary's longest token, if known; `tool_template`: the chat template for
        chats with tools; `named_tokens`: name in chat templates, such as bos_token -> its text."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.added_tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self._decoder = backend.decoder
        steps = _decoder_steps(backend)
        self._byte_level = "ByteLevel" in steps
        self._byte_fallback = "ByteFallback" in steps
        self.vocab_size: int = backend.get_vocab_size()
        self.max_token_chars: int = max_token_chars or max(map(len, backend.get_vocab()), default=1)
        self.special_ids = frozenset(i for i, token in self.added_tokens.items() if token.special)
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        self.tool_template = tool_template  # None: chats with tools have the same template
        self.named_tokens = dict(named_tokens or {})
        self._first_space_dropped = self._decoder is None or _drops_first_space(self._decoder)

    @property
    def backend(self) -> Backend:
        """The object of the package tokenizers: shared by all threads, never changed."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes text; the text of a special token becomes that token. Releases the GIL.

        Raises InvalidRequest on lone surrogates.
        """
        try:
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError:  # tokenizers' error for a string that has no UTF-8
            raise InvalidRequest("text has a lone surrogate; it must be valid Unicode", field="text") from None
        ids: list[int] = encoding.ids
        return ids

    def encode_pair(self, first: str, second: str | None, limit: int | None = None) -> tuple[list[int], int]:
        """Encodes a text or a pair of texts with the special tokens around them, and cuts the longer text first until
        all of it has at most `limit` tokens.

        Returns the token ids, and the first position that is of the second token type; 0 = no such position. Raises
        InvalidRequest on lone surrogates.
        """
        texts = [first] if second is None else [first, second]
        try:
            parts = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # tokenizers' error for a string that has no UTF-8
            raise InvalidRequest("text has a lone surrogate; it must be valid Unicode", field="text") from None
        if limit is not None:
            room = max(0, limit - self._backend.num_special_tokens_to_add(second is not None))
            for part, length in zip(parts, _shares([len(part) for part in parts], room), strict=True):
                part.truncate(length)
        whole = self._backend.post_process(parts[0], parts[1] if len(parts) > 1 else None)
        ids: list[int] = whole.ids
        types: list[int] = whole.type_ids
        return ids, types.index(1) if 1 in types else 0

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Decodes a whole sequence. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are left out."""
        pieces: list[bytes] = []
        after_special = False
        for token_id in ids:
            is_special = token_id in self.special_ids
            if is_special and skip_special_tokens:
                continue
            piece = self.token_bytes(token_id)
            pieces.append(
                piece.lstrip() if is_special and after_special and not spaces_between_special_tokens else piece
            )
            after_special = is_special
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[1:] if self._first_space_dropped and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to running text; a decoder that puts a space between words puts it
        before the word.

        Concatenated and read as UTF-8 they are the decoded text. Empty for an id outside the vocabulary.
        """
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._compute_bytes(token_id)
        return piece

    def all_token_bytes(self) -> list[bytes]:
        """Returns `token_bytes` of every id below `vocab_size`."""
        if self._byte_level and len(self._bytes) < self.vocab_size:
            self._bytes = {**self._all_byte_level(), **self._bytes}
        return [self.token_bytes(token_id) for token_id in range(self.vocab_size)]

    def _all_byte_level(self) -> dict[int, bytes]:
        """Returns the bytes of all tokens that are written in GPT-2's byte alphabet, by id."""
        tokens = [self._id_to_token(token_id) or "" for token_id in range(self.vocab_size)]
        units = np.frombuffer("\0".join([*tokens, ""]).encode("utf-16-le", "surrogatepass"), np.uint16)
        codes = CODES[units]
        ends = np.flatnonzero(codes == END_CODE)
        if len(ends) != len(tokens):  # a token with a zero byte in it
            return {}
        data = codes.astype(np.uint8).tobytes()
        starts = [0, *(ends[:-1] + 1).tolist()]
        others = set(np.searchsorted(ends, np.flatnonzero(codes == OTHER_CODE)).tolist())
        others.update(self.added_tokens, (token_id for token_id, token in enumerate(tokens) if not token))
        spans = enumerate(zip(starts, ends.tolist(), strict=True))
        return {token_id: data[start:end] for token_id, (start, end) in spans if token_id not in others}

    def token_text(self, token_id: int) -> str:
        """Returns the text that the token adds to running text; U+FFFD for bytes that are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token that is written like this in the vocabulary; None = there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def _compute_bytes(self, token_id: int) -> bytes:
        added = self.added_tokens.get(token_id)
        token = added.content if added is not None else self._id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return token.encode() if added is not None else _byte_level_bytes(token)
        if self._byte_fallback and added is None and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._decoder is None:
            return b" " + token.encode()
        text: str = self._decoder.decode([ANCHOR, token])
        return text[len(ANCHOR) :].encode()

    def _id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return token


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Returns the tokens that are kept of each of one or two texts: the longer text is cut until both are as long."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    short = min(min(lengths), room // 2)
    return [short, room - short] if lengths[0] <= lengths[1] else [room - short, short]


def _decoder_steps(backend: Backend) -> set[str]:
    """Returns the names of the decoder's steps. Raises StartupError for a step that gives tokens no fixed text."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    for step in steps:
        if step["type"] not in DECODERS or step.get("stop", 0) != 0:
            raise StartupError(f"the tokenizer's decoder has a step {echo(step['type'])}, which cannot be streamed")
    return {step["type"] for step in steps}


def _drops_first_space(decoder: Decoder) -> bool:
    """Returns whether the decoder drops the space before the first token of a text."""
    probe = gguf_vocab.SPACE + ANCHOR
    whole: str = decoder.decode([ANCHOR, probe])[len(ANCHOR) :]
    alone: str = decoder.decode([probe])
    return whole.startswith(" ") and not alone.startswith(" ")


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Returns GPT-2's byte alphabet, character -> byte: a printable Latin-1 character stands for its own byte, the
    characters from U+0100 on for the other bytes.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py (bytes_to_unicode)
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR: Final = _byte_level_alphabet()
END_CODE, OTHER_CODE = 0x100, 0x101


def _byte_level_codes() -> NDArray[np.uint16]:
    """Returns, by UTF-16 code unit, the byte that the character stands for; END_CODE for zero, OTHER_CODE for
    characters outside of the alphabet."""
    codes = np.full(1 << 16, OTHER_CODE, np.uint16)
    codes[[ord(char) for char in BYTE_OF_CHAR]] = list(BYTE_OF_CHAR.values())
    codes[0] = END_CODE
    return codes


CODES: Final = _byte_level_codes()


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Makes the tokenizer that `tokenizer.ggml.*` describes. Raises StartupError naming the key at fault."""
    backend = gguf_vocab.build_backend(metadata)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos_token_ids=gguf_vocab.end_token_ids(metadata),
        bos_token_id=gguf_vocab.special_id(metadata, "bos_token_id", backend.get_vocab_size()),
        chat_template=template if isinstance(template, str) else None,
        named_tokens=gguf_vocab.named_tokens(metadata),
        max_token_chars=max(map(len, metadata["tokenizer.ggml.tokens"])),
    )


def from_folder(path: Path) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder, or of a tokenizer.json file. Raises StartupError naming the
    file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    folder = file.parent
    backend = _load_backend(file)
    settings = _read_json(folder / "tokenizer_config.json")
    configs = [_read_json(folder / "generation_config.json"), _read_json(folder / "config.json")]
    bos_token_id = _token_of(backend, settings.get("bos_token"))
    if bos_token_id is None:
        bos_token_id = next((c["bos_token_id"] for c in configs if isinstance(c.get("bos_token_id"), int)), None)
    _honour_add_bos(backend, settings.get("add_bos_token"), bos_token_id)
    eos_from_settings = _token_of(backend, settings.get("eos_token"))
    if settings.get("add_eos_token") is True and (folder / "modules.json").exists():
        _append(backend, eos_from_settings)
    eos = [token_id for config in configs for token_id in id_list(config.get("eos_token_id"))]
    templates = _chat_templates(folder, settings)
    return Tokenizer(
        backend,
        eos_token_ids=[*eos, *([] if eos_from_settings is None else [eos_from_settings])],
        bos_token_id=bos_token_id,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        named_tokens={**_named_tokens(_read_json(folder / "special_tokens_map.json")), **_named_tokens(settings)},
    )


def id_list(value: object) -> list[int]:
    """Reads `eos_token_id` of a config.json: an id, a list of ids or null."""
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int) and not isinstance(token_id, bool)]


def _load_backend(file: Path) -> Backend:
    try:
        content = read_regular(file, max_bytes=MAX_FILE_BYTES)
    except FileNotFoundError:
        raise StartupError(
            f"tokenizer {file}: there is no such file; name a folder with tokenizer.json by --tokenizer-path"
        ) from None
    except OSError as error:
        raise StartupError(f"tokenizer {file}: cannot read it: {error.strerror}") from None
    with gguf_vocab.naming_faults(f"tokenizer {file}: cannot be read"):
        _check(content)
        backend = Backend.from_buffer(content)
        with contextlib.suppress(ValueError, TypeError):
            backend.post_process(backend.encode(ANCHOR, add_special_tokens=False))  # panics if it names no known token
    return backend


def _check(content: bytes) -> None:
    """Raise ValueError for a tokenizer.json whose added tokens take the library too long, or with a merge that makes no
    token. The library reports all other faults."""
    try:
        parts = msgspec.json.decode(content, type=_TokenizerFile)
    except (ValueError, RecursionError):
        raise ValueError("it is not a valid tokenizer.json") from None
    num_chars = sum(len(token.content) for token in parts.added_tokens)
    if num_chars > gguf_vocab.MAX_ADDED_CHARS:
        raise ValueError(
            f"its added_tokens have {num_chars} characters; at most {gguf_vocab.MAX_ADDED_CHARS} are taken"
        )
    try:
        model = msgspec.json.decode(parts.model, type=_Bpe)
    except (ValueError, RecursionError):  # of another kind
        return
    merges = (merge.partition(" ")[::2] if isinstance(merge, str) else merge for merge in model.merges)
    gguf_vocab.check_merges(model.vocab, merges, model.continuing_subword_prefix or "")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(file))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StartupError(f"{file}: cannot read it: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise StartupError(f"{file}: not valid JSON; download the model again") from None
    if not isinstance(value, dict):
        raise StartupError(f"{file}: must hold a JSON object; download the model again")
    return value


def _token_of(backend: Backend, value: object) -> int | None:
    text = value.get("content") if isinstance(value, dict) else value
    token_id: int | None = backend.token_to_id(text) if isinstance(text, str) else None
    return token_id


def _honour_add_bos(backend: Backend, add_bos_token: object, bos_token_id: int | None) -> None:
    """Makes the tokenizer follow `add_bos_token` of tokenizer_config.json when its post-processor does not."""
    if not isinstance(add_bos_token, bool) or bos_token_id is None:
        return
    adds = backend.encode(ANCHOR).ids[:1] == [bos_token_id]
    if add_bos_token and not adds:
        gguf_vocab.add_around(backend, bos_token_id, None)
    elif adds and not add_bos_token:
        gguf_vocab.add_around(backend, None, None)


def _append(backend: Backend, eos_token_id: int | None) -> None:
    """Makes the tokenizer append EOS as an embedding model's tokenizer_config.json asks, when its post-processor does
    not."""
    ids = backend.encode(ANCHOR).ids
    plain = backend.encode(ANCHOR, add_special_tokens=False).ids
    if eos_token_id is not None and ids[-1] != eos_token_id:
        first = ids[0] if len(ids) > len(plain) else None
        gguf_vocab.add_around(backend, first, eos_token_id)


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings named *_token, such as eos_token, whose values are texts or objects with a text."""
    values = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name: `default`, and often `tool_use`."""
    stored = _read_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(stored, str):
        stored = {"default": stored}
    elif isinstance(stored, list):
        stored = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
    templates = stored if isinstance(stored, dict) else {}
    files = {"default": folder / "chat_template.jinja", "tool_use": folder / "additional_chat_templates/tool_use.jinja"}
    for name, file in files.items():
        try:
            templates[name] = read_text(file, errors="replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StartupError(f"{file}: cannot read it: {error.strerror}") from None
    return {name: text for name, text in templates.items() if isinstance(text, str)}
