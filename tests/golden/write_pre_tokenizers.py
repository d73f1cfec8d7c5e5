"""Writes pre_tokenizers.json: the words into which llama.cpp splits texts, for each name of a pre-tokenizer.

    LD_LIBRARY_PATH=LIBRARIES python tests/golden/write_pre_tokenizers.py LIBRARIES

LIBRARIES: the folder bins/linux-x64 of the npm package @node-llama-cpp/linux-x64 3.x, with llama.cpp v0.5.0. Each file
has a vocabulary in which every run of bytes of the texts is a token with all its merges, so that each word is a token.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tiny_gguf

from tureen.text.pre_tokenizers import NAMES
from tureen.text.tokenizer import BYTE_OF_CHAR

TEXTS = (
    "Hello world's end, I'M here; we'll SEE'LL don't",
    "1234567 12 1 3.14159 ١٢٣ ½ 0x1F",
    " \n\n  \n\t\ttab   \r\n end  ",
    "  leading  and trailing   ",
    "if (x==1){return a/b;}//ok\n/path/to",
    "camelCaseWord HTTPServer iPhone ABCdef",
    "日本語のテキスト。中文，漢字！",
    "한국어 문장 안녕",
    "Привет Мир ёжик",
    "a🙂b 👩‍👩‍👧 ❤️!?",
    "e\u0301a\u0300 naïve Ö",
    "नमस्ते दुनिया",
    "ไทยภาษา ກ",
    '$100 <b>x|y^~`z</b> "q"...',
    "a_b-c@d.com #tag [x](y)",
    "\u00a0nbsp\u3000wide",
    "؟سلام، دنيا",
    " 's 've x'd'S",
    "ﬁ ǅ ʰ ªº",
    "1a2b 2024年12月 v1.2",
    "\n\n\n",
    "12345678901234",
    "<sentinel:12>IMGIMGABZ    x",
    "a           b",
    "한글ㄱㄴ！…ㄅㄆ",
)
LONGEST = 26  # bytes of a token
ALONE = "zqj"  # a token without merges
PAD = "@" * 32  # replaced by each name
VOCAB_ONLY = 72  # where llama_model_params of v0.5.0 has this flag


class Params(ctypes.Structure):
    """llama_model_params of v0.5.0."""

    _fields_ = (("content", ctypes.c_ubyte * 80),)


def main(folder: Path) -> None:
    library = load_library(folder)
    tokens, merges = vocabulary()
    alone = len(tokens) - 1
    results: list[list[str]] = []
    names: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        template = write_template(Path(scratch) / "template.gguf", tokens, merges)
        for name in sorted(NAMES):
            path = Path(scratch) / "model.gguf"
            path.write_bytes(template.replace(_string(PAD), _string(name)))
            params = library.llama_model_default_params()
            params.content[VOCAB_ONLY] = 1
            model = library.llama_model_load_from_file(str(path).encode(), params)
            if not model:
                print(f"llama.cpp does not know {name}")
                continue
            vocab = library.llama_model_get_vocab(model)
            words = [" ".join(str(len(tokens[i])) for i in token_ids(library, vocab, text)) for text in TEXTS]
            if words not in results:
                results.append(words)
            names[name] = {
                "words": results.index(words),
                "bos": library.llama_vocab_get_add_bos(vocab),
                "whole": token_ids(library, vocab, ALONE) == [alone],
            }
            library.llama_model_free(model)
    recorded = {"texts": TEXTS, "names": names, "words": results}
    text = json.dumps(recorded, ensure_ascii=False, indent=1)
    Path(__file__).with_name("pre_tokenizers.json").write_text(text + "\n", encoding="utf-8")


def load_library(folder: Path) -> Any:
    ggml = [ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in ("libggml-base.so", "libggml.v0.5.0.so")][1]
    library = ctypes.CDLL(str(folder / "libllama.v0.5.0.so"), ctypes.RTLD_GLOBAL)
    pointer = ctypes.c_void_p
    library.llama_model_default_params.restype = Params
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
    library.llama_model_load_from_file.restype = pointer
    library.llama_model_free.argtypes = [pointer]
    library.llama_model_get_vocab.argtypes = [pointer]
    library.llama_model_get_vocab.restype = pointer
    library.llama_vocab_get_add_bos.argtypes = [pointer]
    library.llama_vocab_get_add_bos.restype = ctypes.c_bool
    flag, number = ctypes.c_bool, ctypes.c_int32
    library.llama_tokenize.argtypes = [pointer, ctypes.c_char_p, number, pointer, number, flag, flag]
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    return library


def token_ids(library: Any, vocab: int, text: str) -> list[int]:
    raw = text.encode()
    ids = (ctypes.c_int32 * len(raw))()
    count = library.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, False)
    return list(ids[:count])


def vocabulary() -> tuple[list[str], list[str]]:
    """Returns tokens and merges."""
    chars = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    runs = set()
    for raw in (text.encode() for text in TEXTS):
        for start in range(len(raw)):
            runs |= {raw[start:end] for end in range(start + 2, min(len(raw), start + LONGEST) + 1)}
    written = ["".join(chars[byte] for byte in run) for run in sorted(runs, key=lambda run: (len(run), run))]
    merges = [f"{run[:at]} {run[at:]}" for run in written for at in range(1, len(run))]
    return [*(chars[byte] for byte in range(256)), *written, ALONE], merges


def write_template(path: Path, tokens: list[str], merges: list[str]) -> bytes:
    metadata = tiny_gguf.architecture_metadata("llama") | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PAD,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [tiny_gguf.NORMAL] * len(tokens),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return tiny_gguf.write_gguf(path, metadata).read_bytes()


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
