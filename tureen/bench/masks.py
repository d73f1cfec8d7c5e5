"""Measures the cost of constraints: compiling schemas, and filling masks for outputs drawn at random.

Times are the processor time of one thread, Python's calls included. Compiling starts with the schema's text.
"""

from __future__ import annotations

import gc
import random
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.build import vocabulary_of
from tureen.errors import InvalidRequest
from tureen.grammar import Grammar, GrammarError, GrammarSpec, LanguageCompiler, Vocabulary, compile_grammar, practise
from tureen.grammar.guard.guarded import GuardedGrammar
from tureen.kernels.cpu import native
from tureen.text.tokenizer import Tokenizer

NUM_OUTPUTS = 3  # of each schema
MOST_TOKENS = 80  # of an output; after half of them it hurries to its end
HURRYING = (b'"', b"}", b"]", b'",', b'"}')
SHORT_SHARE = 0.6  # of the tokens that are the shortest of a few drawn: structure, where it is allowed
US, MS = 1e6, 1e3


class TimeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of measured times."""

    count: int
    mean: float
    p50: float
    p99: float
    worst: float

    @classmethod
    def of(cls, times_s: Sequence[float], scale: float) -> TimeFigures:
        """Returns the figures of times, in units of which a second has `scale`."""
        times = np.array(times_s or [0.0]) * scale
        p50, p99 = np.quantile(times, [0.5, 0.99]).round(2).tolist()
        mean, worst = round(float(times.mean()), 2), round(float(times.max()), 2)
        return cls(count=len(times_s), mean=mean, p50=p50, p99=p99, worst=worst)


class MaskFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of the schemas of one corpus, with one vocabulary."""

    vocabulary: int
    schemas: int
    refused: int
    cut: int  # outputs that a grammar gave up
    mask_us: TimeFigures  # without the first masks and the guarded ones
    guarded_mask_us: TimeFigures
    first_mask_us: TimeFigures  # of each schema
    compile_ms: TimeFigures


class _Times:
    """The measured times, in seconds."""

    def __init__(self) -> None:
        self.masks: list[float] = []
        self.guarded: list[float] = []
        self.firsts: list[float] = []
        self.compiles: list[float] = []


def run_masks(corpus: Path, tokenizer: Tokenizer, every: int, say: Callable[[str], None]) -> MaskFigures:
    """Measures every `every`-th schema of a folder or archive of JSON files. Raises InvalidRequest if it has none."""
    vocabulary = vocabulary_of(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size, "auto")
    languages = LanguageCompiler(vocabulary, partial(tokenizer.encode, add_special_tokens=False), native.require())
    texts = sorted(_texts(corpus))[::every]
    if not texts:
        raise InvalidRequest(f"--masks {corpus}: it has no file whose name ends in .json")
    practise()
    # The fork server also freezes its objects, and its workers collect garbage after each constraint.
    gc.collect()
    gc.freeze()
    gc.disable()
    times, num_refused, num_cut = _Times(), 0, 0
    for number, (name, text) in enumerate(texts):
        if number % 100 == 0:
            say(f"{number} of {len(texts)} schemas")
        start_s = time.process_time()
        try:
            compiled = compile_grammar(GrammarSpec("json_schema", text), languages)
        except GrammarError:
            num_refused += 1
            continue
        times.compiles.append(time.process_time() - start_s)
        gc.collect()
        for output in range(NUM_OUTPUTS):
            num_cut += not _follow(compiled.start(), vocabulary, times, random.Random(f"{name} {output}"), output)
    return MaskFigures(
        vocabulary=vocabulary.size,
        schemas=len(texts),
        refused=num_refused,
        cut=num_cut,
        mask_us=TimeFigures.of(times.masks, US),
        guarded_mask_us=TimeFigures.of(times.guarded, US),
        first_mask_us=TimeFigures.of(times.firsts, US),
        compile_ms=TimeFigures.of(times.compiles, MS),
    )


def _follow(grammar: Grammar, vocabulary: Vocabulary, times: _Times, dice: random.Random, number: int) -> bool:
    """Draws an output under a grammar. Returns False if the grammar gives up."""
    mask = np.zeros(-(-vocabulary.size // 32), dtype=np.uint32)
    is_guarded = isinstance(grammar, GuardedGrammar)
    others = times.guarded if is_guarded else times.masks
    hurrying = [vocabulary.tokens.index(text) for text in HURRYING if text in vocabulary.tokens]
    for at in range(MOST_TOKENS):
        start_s = time.thread_time()
        try:
            grammar.fill_mask(mask)
        except GrammarError:
            return False
        (others if at or number or is_guarded else times.firsts).append(time.thread_time() - start_s)
        token_id = _drawn(mask, vocabulary, dice, hurrying if 2 * at > MOST_TOKENS else ())
        if token_id is None or not grammar.accept(token_id):
            return True
    return True


def _drawn(
    mask: NDArray[np.uint32], vocabulary: Vocabulary, dice: random.Random, hurrying: Sequence[int]
) -> int | None:
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    for token_id in hurrying:
        if mask[token_id // 32] >> np.uint32(token_id % 32) & 1:
            return token_id
    if not len(allowed):
        return None
    some = [int(dice.choice(allowed)) for _ in range(4)]
    return min(some, key=lambda index: len(vocabulary.tokens[index])) if dice.random() < SHORT_SHARE else some[0]


def _texts(corpus: Path) -> Iterator[tuple[str, str]]:
    if corpus.is_dir():
        for path in corpus.rglob("*.json"):
            yield str(path.relative_to(corpus)), path.read_text(encoding="utf-8")
        return
    try:
        with tarfile.open(corpus) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".json") else None
                if file is not None:
                    yield member.name, file.read().decode()
    except (OSError, tarfile.TarError) as error:
        raise InvalidRequest(f"--masks {corpus}: it is not a folder or an archive of JSON schemas ({error})") from None


def table(figures: MaskFigures) -> str:
    """Returns the figures as Markdown."""
    rows = (
        ("mask, µs", figures.mask_us),
        ("guarded mask, µs", figures.guarded_mask_us),
        ("first mask, µs", figures.first_mask_us),
        ("compile, ms", figures.compile_ms),
    )
    head = (
        f"{figures.schemas} schemas, {figures.vocabulary} tokens; {figures.refused} refused, {figures.cut} outputs cut",
        "",
        "| | count | mean | p50 | p99 | worst |",
        "|---|---|---|---|---|---|",
    )
    return "\n".join(
        (*head, *(f"| {name} | {s.count} | {s.mean} | {s.p50} | {s.p99} | {s.worst} |" for name, s in rows))
    )
