"""A grammar over token ids that is nothing but a hash: what may come next depends on all that came before."""

from __future__ import annotations

import random
from hashlib import blake2b
from types import SimpleNamespace
from typing import NamedTuple

from tureen.contract.runner import RowError
from tureen.grammar.base import packed

BROKEN = "broken"


class Rule(NamedTuple):
    allowed: frozenset[int]  # without EOS
    is_accepting: bool


COMPLETE = Rule(frozenset(), True)


def rule(text: str, output: tuple[int, ...], vocab_size: int, eos_ids: tuple[int, ...]) -> Rule:
    """What may follow these output tokens in the language called `text`, which is "NAME LONGEST"."""
    name, longest = text.split()
    digest = blake2b(f"{name} {output}".encode(), digest_size=16).digest()
    if len(output) >= int(longest):
        return COMPLETE
    kind = digest[0] % 5
    if kind < 2:
        tokens = {digest[1] % vocab_size}
    elif kind < 4:
        tokens = {byte % vocab_size for byte in digest[2:9]}
    else:
        tokens = set(range(vocab_size))
    allowed = frozenset(tokens) - set(eos_ids) or frozenset({(eos_ids[0] + 1) % vocab_size})
    return Rule(allowed, digest[9] % 3 == 0)


class ToyGrammar:
    def __init__(self, text, vocab_size, eos_ids):
        self.text, self.vocab_size, self.eos_ids = text, vocab_size, eos_ids
        self.output = ()

    def _rule(self, output):
        return rule(self.text, output, self.vocab_size, self.eos_ids)

    def fill_mask(self, mask):
        allowed, is_accepting = self._rule(self.output)
        mask[:] = 0
        for token in (*allowed, *(self.eos_ids if is_accepting else ())):
            mask[token // 32] |= 1 << token % 32

    def accept(self, token_id):
        if token_id not in self._rule(self.output).allowed:
            return False
        self.output += (token_id,)
        return True

    def rollback(self, num_tokens):
        self.output = self.output[: len(self.output) - num_tokens]

    def forced(self):
        found = []
        while len(found) < 5:
            allowed, is_accepting = self._rule((*self.output, *found))
            if is_accepting or len(allowed) != 1:
                break
            found += allowed
        return found

    @property
    def is_accepting(self):
        return self._rule(self.output).is_accepting

    @property
    def is_done(self):
        return self.is_accepting and not self._rule(self.output).allowed


class ToyCompilation:
    least = None  # it is not known how to come to an end
    reserve = 0
    unenforced = ()

    def __init__(self, make, ends, text, num_polls):
        self.make, self.ends, self.text, self.num_polls = make, ends, text, num_polls

    @property
    def state(self):
        if self.num_polls > 0:
            return "pending"
        return "failed" if self.error else "ready"

    @property
    def error(self):
        return RowError("invalid_regex", "it is broken", 400) if self.text == BROKEN else None

    @property
    def compiled(self):
        return None if self.error else self

    def start(self):
        return self.make(self.text)


class ToyCompiler:
    """Takes a random number of polls for each grammar."""

    supervisor = None  # it has no processes

    def __init__(self, vocab_size, eos_ids, seed=0):
        self.make = lambda text: ToyGrammar(text, vocab_size, eos_ids)
        self.ends = packed(eos_ids, vocab_size)
        self.rng = random.Random(seed)
        self.pending = []
        self.is_closed = False

    def submit(self, spec):
        made = ToyCompilation(self.make, self.ends, spec.text, self.rng.choice([0, 1, 5]))
        self.pending.append(made)
        return made

    def poll(self):
        for one in self.pending:
            one.num_polls -= 1
        self.pending = [one for one in self.pending if one.state == "pending"]

    def release(self, compilation):
        if compilation in self.pending:
            self.pending.remove(compilation)

    def clear(self):
        pass

    @property
    def stats(self):
        return SimpleNamespace(compiles=0, hits=0, failures=0, timeouts=0, compile_ms=0.0)

    def close(self):
        self.is_closed = True
