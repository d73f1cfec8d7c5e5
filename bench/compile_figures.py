"""How many real schemas compile, and in what processor time, beside the libraries' own readers, in one run.

`python bench/compile_figures.py [--every 4] [--busy 8] [--json FILE]` takes every fourth schema of
tests/grammar/schema_corpus.tar.xz, and the default model's vocabulary. Each reader compiles a schema until a first mask
could be filled, in a child process with limits of time and memory; the lesser of two times counts. The times in the
table are scaled by a fixed piece of work that is timed before each schema, so that a machine in use changes them less.
With `--busy` the schemas go through the server's own compiler instead, while as many busy loops run: what it refuses
for want of time is a false refusal.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import resource
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import llguidance
import xgrammar

from tureen import config, config_sources
from tureen.build import vocabulary_of
from tureen.grammar import GrammarError, GrammarSpec, LanguageCompiler, Vocabulary, compile_grammar, practise
from tureen.grammar_service.compiler import Compiler
from tureen.kernels.cpu import native
from tureen.weights.source import load_tokenizer, resolve_model

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "grammar" / "schema_corpus.tar.xz"
SHARES = (50, 90, 99)
MAX_CPU_S = 10.0
"""What a reader may take for one schema."""
MAX_TWICE_MS = 200.0
"""What takes longer is not read twice."""
MAX_BYTES = 8 << 30
OURS = "tureen"
FORK = multiprocessing.get_context("fork")  # a child has the readers


def vocabulary_and_encode() -> tuple[Vocabulary, Callable[[str], list[int]]]:
    cache_dir = config.cache_dir(config_sources.load({}))
    tokenizer = load_tokenizer(resolve_model(config.DEFAULT_MODEL, cache_dir=cache_dir))
    vocabulary = vocabulary_of(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size, "auto")
    return vocabulary, partial(tokenizer.encode, add_special_tokens=False)


class ByteTokens:
    """The tokenizer's interface that LLTokenizer asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.tokens = [*vocabulary.tokens, b"</s>"]
        self.eos_token_id = len(vocabulary.tokens)
        self.special_token_ids = [self.eos_token_id]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def readers(vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> dict[str, Callable[[str], None]]:
    """By name: each compiles a schema, or raises."""
    languages = LanguageCompiler(vocabulary, encode, native.require())
    tokenizer = llguidance.LLTokenizer(ByteTokens(vocabulary, encode))  # type: ignore[arg-type]  # by shape
    practise()  # as before the server's workers are forked

    def ours(text: str) -> None:
        compile_grammar(GrammarSpec("json_schema", text), languages)

    def theirs(text: str, *, is_lenient: bool) -> None:
        options = json.dumps({"lenient": is_lenient, "whitespace_flexible": False})
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=json.loads(options))
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

    info = xgrammar.TokenizerInfo(
        list(vocabulary.tokens), vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.eos_token_ids)
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def xgrammars(text: str) -> None:
        compiler.compile_json_schema(text, any_whitespace=False)

    return {
        OURS: ours,
        "llguidance": partial(theirs, is_lenient=False),
        "llguidance, lenient": partial(theirs, is_lenient=True),
        "xgrammar": xgrammars,
    }


class Outcome(NamedTuple):
    """What became of one schema."""

    ms: float  # of processor time; negative where it was refused
    calibration_ms: float  # of a fixed piece of work, just before


def measured(read: Callable[[str], None], texts: list[str]) -> list[Outcome | None]:
    """Reads the schemas in child processes; None for those that ended one, by time or by memory."""
    outcomes: list[Outcome | None] = []
    while len(outcomes) < len(texts):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = FORK.Process(target=_read_all, args=(read, texts[len(outcomes) :], sender))
        child.start()
        sender.close()
        with receiver, contextlib.suppress(EOFError):
            before_s = _cpu_s(child.pid)
            while True:
                if receiver.poll(0.5):
                    outcomes.append(Outcome(*receiver.recv()))
                    before_s = _cpu_s(child.pid)
                elif _cpu_s(child.pid) - before_s > MAX_CPU_S:
                    child.kill()
        child.join()
        if len(outcomes) < len(texts):
            outcomes.append(None)
    return outcomes


def _read_all(read: Callable[[str], None], texts: list[str], sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    for text in texts:
        gc.collect()
        calibration_ms = min(_cpu_ms(_calibrate) for _ in range(3))
        try:
            ms = _cpu_ms(partial(read, text))
            ms = min(ms, _cpu_ms(partial(read, text))) if ms < MAX_TWICE_MS else ms
        except (GrammarError, ValueError, RuntimeError):
            ms = -1.0
        sender.send((ms, calibration_ms))


def _cpu_s(pid: int | None) -> float:
    """Returns the processor time of a process so far. A timer in the child itself would do the same, but while one is
    set its own clock is too coarse on some systems."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _calibrate() -> None:
    json.loads(json.dumps([{"key": str(number), "values": [number] * 8} for number in range(400)]))


def figures_of(outcomes: list[Outcome | None], quick_ms: float) -> dict[str, Any]:
    """Returns how many were compiled, and in what time: as measured, and as if all of it had run as fast as the
    quickest of the machine, where the fixed piece of work takes `quick_ms`."""
    compiled = [outcome for outcome in outcomes if outcome is not None and outcome.ms >= 0]
    ended = outcomes.count(None)
    times = sorted(outcome.ms for outcome in compiled)
    scaled = sorted(outcome.ms * quick_ms / outcome.calibration_ms for outcome in compiled)
    return {
        "compiled": len(compiled),
        "refused": len(outcomes) - len(compiled) - ended,
        "over the limits": ended,
        "share": round(len(compiled) / len(outcomes), 4),
        "cpu_ms": _shares(times),
        "scaled_cpu_ms": _shares(scaled),
    }


def _shares(ordered: list[float]) -> dict[str, float]:
    return {f"p{share}": round(ordered[len(ordered) * share // 100], 2) for share in SHARES}


def ratio(outcomes: list[Outcome | None], others: list[Outcome | None]) -> dict[str, float]:
    """Returns how often the time of the other one is ours, over the schemas that both compile."""
    both = [(a, b) for a, b in zip(outcomes, others, strict=True) if a and b and a.ms >= 0 and b.ms > 0]
    return _shares(sorted((a.ms / a.calibration_ms) / (b.ms / b.calibration_ms) for a, b in both))


def compared(texts: list[str], reads: dict[str, Callable[[str], None]]) -> dict[str, Any]:
    """Returns the figures of each reader; they read side by side, so that each has its share of a busy machine."""
    with ThreadPoolExecutor(len(reads)) as threads:
        each = threads.map(lambda read: measured(read, texts), reads.values())
        outcomes: dict[str, list[Outcome | None]] = dict(zip(reads, each, strict=True))
    calibrations = sorted(outcome.calibration_ms for read in outcomes.values() for outcome in read if outcome)
    quick_ms = calibrations[len(calibrations) // 50]
    result: dict[str, Any] = {"calibration_ms": {"quick": round(quick_ms, 3)} | _shares(calibrations)}
    for name, read in outcomes.items():
        result[name] = figures_of(read, quick_ms)
        if name != OURS:
            result[name][f"time of '{OURS}', of the same schemas"] = ratio(outcomes[OURS], read)
    return result


def table(result: dict[str, Any]) -> str:
    """Returns the figures as Markdown."""
    lines = ["| | compiled | refused | over the limits | " + " | ".join(f"CPU p{share}" for share in SHARES) + " |"]
    lines.append("|---" * (4 + len(SHARES)) + "|")
    for name, figures in result.items():
        if isinstance(figures, dict) and "compiled" in figures:
            times = " | ".join(f"{figures['scaled_cpu_ms'][f'p{share}']} ms" for share in SHARES)
            counts = " | ".join(str(figures[key]) for key in ("compiled", "refused", "over the limits"))
            lines.append(f"| {name} | {counts} | {times} |")
    return "\n".join(lines)


def _cpu_ms(work: Callable[[], None]) -> float:
    gc.disable()
    start_s = time.process_time()
    try:
        work()
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
            result |= compared(texts, readers(vocabulary, encode))
    finally:
        for loop in loops:
            loop.kill()
    print(json.dumps(result, indent=1) if settings.busy else table(result))
    if settings.json:
        settings.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
