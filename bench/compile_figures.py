"""How many real schemas compile, and in what processor time, beside the libraries' own readers, in one run.

`python bench/compile_figures.py [--every 4] [--busy 8] [--json FILE]` takes every fourth schema of
tests/grammar/schema_corpus.tar.xz, and the default model's vocabulary. Each reader compiles a schema until a first mask
could be filled; the least of two times counts. With `--busy` the schemas go through the server's own compiler instead,
while as many busy loops run: what it refuses for want of time is a false refusal.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import xgrammar

from tureen import config
from tureen.constraining.compiler import Compiler
from tureen.grammar import GrammarError, GrammarSpec, Vocabulary, find_backend, language_of
from tureen.grammar.closing import ClosingCompiler
from tureen.weights.source import load_tokenizer, resolve_model

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "grammar" / "schema_corpus.tar.xz"
SHARES = (50, 90, 99)


def vocabulary_and_encode() -> tuple[Vocabulary, Callable[[str], list[int]]]:
    cache_dir = config.cache_dir(config.load({}))
    tokenizer = load_tokenizer(resolve_model(config.DEFAULT_MODEL, cache_dir=cache_dir))
    special = tokenizer.special_ids
    tokens = tuple(b"" if index in special else tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size))
    vocabulary = Vocabulary(tokens, tokenizer.eos_token_ids, tokenizer.vocab_size)
    return vocabulary, partial(tokenizer.encode, add_special_tokens=False)


def readers(vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> dict[str, Callable[[str], None]]:
    """By name: each compiles a schema, or raises."""
    backend: Any = find_backend("llguidance")(vocabulary, encode)

    closings = ClosingCompiler(vocabulary)

    def ours(text: str) -> None:
        backend.load(backend.translate(language_of(GrammarSpec("json_schema", text))))

    def ours_that_closes(text: str) -> None:
        language = language_of(GrammarSpec("json_schema", text))
        backend.load(backend.translate(language))
        closings.load(closings.translate(language))

    def theirs(text: str, *, is_lenient: bool) -> None:
        options = json.dumps({"lenient": is_lenient, "whitespace_flexible": False})
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=json.loads(options))
        matcher = llguidance.LLMatcher(backend._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

    info = xgrammar.TokenizerInfo(
        list(vocabulary.tokens), vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.eos_token_ids)
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def xgrammars(text: str) -> None:
        compiler.compile_json_schema(text, any_whitespace=False)

    return {
        "tureen": ours,
        "tureen, and what closes answers": ours_that_closes,
        "llguidance": partial(theirs, is_lenient=False),
        "llguidance, lenient": partial(theirs, is_lenient=True),
        "xgrammar": xgrammars,
    }


def measured(read: Callable[[str], None], texts: list[str]) -> dict[str, Any]:
    times, refused = [], 0
    for text in texts:
        gc.collect()
        try:
            times.append(min(_cpu_ms(read, text) for _ in range(2)))
        except (GrammarError, ValueError, RuntimeError):
            refused += 1
    times.sort()
    return {
        "compiled": len(times),
        "refused": refused,
        "share": round(len(times) / len(texts), 4),
        "cpu_ms": {f"p{share}": round(times[len(times) * share // 100], 1) for share in SHARES},
    }


def table(result: dict[str, Any]) -> str:
    """Returns the figures as Markdown."""
    lines = ["| | compiled | refused | " + " | ".join(f"CPU p{share}" for share in SHARES) + " |"]
    lines.append("|---" * (3 + len(SHARES)) + "|")
    for name, figures in result.items():
        if isinstance(figures, dict):
            times = " | ".join(f"{figures['cpu_ms'][f'p{share}']} ms" for share in SHARES)
            lines.append(f"| {name} | {figures['compiled']} | {figures['refused']} | {times} |")
    return "\n".join(lines)


def _cpu_ms(read: Callable[[str], None], text: str) -> float:
    gc.disable()
    start_s = time.process_time()
    try:
        read(text)
    finally:
        elapsed_s = time.process_time() - start_s
        gc.enable()
    return elapsed_s * 1000


def busy() -> None:
    while True:
        pass


def through_the_server(vocabulary: Vocabulary, encode: Callable[[str], list[int]], texts: list[str]) -> dict[str, Any]:
    """How the server's compiler answers, one schema after the other."""
    compiler = Compiler("llguidance", lambda: vocabulary, encode)
    codes: Counter[str] = Counter()
    waits_s = []
    try:
        for text in texts:
            start_s = time.monotonic()
            compilation = compiler.submit(GrammarSpec("json_schema", text))
            while compilation.state == "pending":
                compiler.poll()
                time.sleep(0.002)
            waits_s.append(time.monotonic() - start_s)
            codes["compiled" if compilation.error is None else compilation.error.code] += 1
    finally:
        compiler.close()
    waits_s.sort()
    waits = {f"p{share}": round(waits_s[len(waits_s) * share // 100], 3) for share in SHARES}
    return {"answers": dict(codes), "wait_s": waits | {"longest": round(waits_s[-1], 3)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    with tarfile.open(CORPUS) as archive:
        files = [archive.extractfile(member) for member in archive]
        texts = [file.read().decode() for file in files if file is not None][:: settings.every]
    vocabulary, encode = vocabulary_and_encode()
    result: dict[str, Any] = {"schemas": len(texts), "busy_loops": settings.busy, "load": round(os.getloadavg()[0], 1)}
    loops = [multiprocessing.Process(target=busy, daemon=True) for _ in range(settings.busy)]
    for loop in loops:
        loop.start()
    try:
        if settings.busy:
            result["server"] = through_the_server(vocabulary, encode, texts)
        else:
            for name, read in readers(vocabulary, encode).items():
                result[name] = measured(read, texts)
    finally:
        for loop in loops:
            loop.kill()
    print(json.dumps(result, indent=1) if settings.busy else table(result))
    if settings.json:
        settings.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
