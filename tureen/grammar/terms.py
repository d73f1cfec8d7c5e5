"""Terms of regular expressions: interned, and simplified as they are built, so that derivatives stay few and small.

The simplifications are those of Owens, Reppy and Turon, "Regular-expression derivatives re-examined" (2009), and some
for counted repeats and lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tureen.grammar.alphabet import Alphabet
from tureen.grammar.expression import GrammarError

MAX_WORK = 400_000  # parts of terms built for one question: about a second
UNBOUNDED = 10**18  # `most` of a repeat without end, and the length of the longest string where there is none
WORD_CHARS = 32  # a longer text is cut up, so that its suffixes stay small

EMPTY, NOTHING, ANY, ANYTHING = 0, 1, 2, 3  # the terms every `TermTable` begins with
WORD, SET, CHAIN, CHOICE, REPEAT, BOTH, NOT = range(7)


class TermTable:
    """Terms by number, equal ones once; for many an expression of the same language it is the same term.

    Without Both and Not only NOTHING is the empty language. Every method raises GrammarError when the work of all calls
    together passes MAX_WORK.
    """

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet
        self.nullable: list[bool] = []  # matches the empty string
        self.plain: list[bool] = []  # without Both and Not
        self.lengths: list[tuple[int, int]] = []  # no shorter, no longer string is matched
        self.keys: list[tuple[int, ...]] = []  # kind and parts
        self._ids: dict[tuple[int, ...], int] = {}
        self.words: list[str] = []
        self.sets: list[frozenset[int]] = []
        self._set_ids: dict[frozenset[int], int] = {}
        self._joined: dict[tuple[int, int], int] = {}
        self._work = 0
        self._word_ids: dict[str, int] = {}
        self._make((WORD, -1), True, True, (0, 0))
        self._make((CHOICE,), False, True, (UNBOUNDED, 0))
        self.one_of(frozenset(range(len(alphabet.atoms))))
        self.repeat(ANY, 0, UNBOUNDED)

    def _make(self, key: tuple[int, ...], nullable: bool, plain: bool, lengths: tuple[int, int]) -> int:
        known = self._ids.get(key)
        if known is None:
            self.spend(len(key))
            known = self._ids[key] = len(self.keys)
            self.keys.append(key)
            self.nullable.append(nullable)
            self.plain.append(plain)
            self.lengths.append(lengths)
        return known

    def spend(self, work: int) -> None:
        """Counts what is built. Raises GrammarError when it is too much."""
        self._work += work
        if self._work > MAX_WORK:
            raise GrammarError(
                "the expression is too complex: its automaton is too large; use fewer or smaller counted repeats,"
                " alternatives and lookaheads"
            )

    def word(self, text: str) -> int:
        """Returns the term of exactly this string of at most WORD_CHARS."""
        if len(text) < 2:
            return self.one_of(frozenset((self.alphabet.by_char[text],))) if text else EMPTY
        number = self._word_ids.get(text)
        if number is None:
            number = self._word_ids[text] = len(self.words)
            self.words.append(text)
        return self._make((WORD, number), False, True, (len(text), len(text)))

    def one_of(self, atoms: frozenset[int]) -> int:
        """Returns the term of one character of these atoms."""
        if not atoms:
            return NOTHING
        number = self._set_ids.get(atoms)
        if number is None:
            number = self._set_ids[atoms] = len(self.sets)
            self.sets.append(atoms)
        return self._make((SET, number), False, True, (1, 1))

    def sequence(self, terms: list[int]) -> int:
        """Joins terms one after the other."""
        result = EMPTY
        for term in reversed(terms):
            result = self.chain(term, result)
        return result

    def chain(self, first: int, second: int) -> int:
        """Joins two terms. Chains are nested to the right; what was joined on the way is remembered."""
        following, after = self.parted(second)
        item, least, most = _counted(self.keys, following)
        if item == first and following != first:
            return self.chain(self.repeat(item, least + 1, most + 1), after)
        path = []
        while self.keys[first][0] == CHAIN and (first, second) not in self._joined:
            path.append(first)
            first = self.keys[first][2]
        known = self._joined.get((first, second))
        if known is None:
            known = self._joined[first, second] = self._pair(first, second)
        for node in reversed(path):
            known = self._joined[node, second] = self._pair(self.keys[node][1], known)
        return known

    def _pair(self, head: int, rest: int) -> int:
        """`head`, which is no chain, before `rest`; neighbours x{a,b} x{c,d} become x{a+c,b+d}."""
        if head == NOTHING or rest == NOTHING:
            return NOTHING
        if head == EMPTY or rest == EMPTY:
            return head if rest == EMPTY else rest
        following, after = self.parted(rest)
        item, least, most = _counted(self.keys, head)
        if following == ANYTHING and self._least(head) != head:
            return self.chain(self._least(head), rest)
        if head == ANYTHING and self._least(following) != following:
            return self.chain(head, self.chain(self._least(following), after))
        other, more, most_more = _counted(self.keys, following)
        if item == other:
            return self.chain(self.repeat(item, least + more, most + most_more), after)
        (low, high), (low2, high2) = self.lengths[head], self.lengths[rest]
        return self._make(
            (CHAIN, head, rest),
            self.nullable[head] and self.nullable[rest],
            self.plain[head] and self.plain[rest],
            (low + low2, min(high + high2, UNBOUNDED)),
        )

    def _least(self, term: int) -> int:
        """The fewest repeats: what stands for any number of them beside ANYTHING."""
        item, least, _ = _counted(self.keys, term)
        return self.repeat(item, least, least)

    def parted(self, term: int) -> tuple[int, int]:
        """Returns the head and the rest of a chain; any other term is its own head."""
        key = self.keys[term]
        return (key[1], key[2]) if key[0] == CHAIN else (term, EMPTY)

    def repeat(self, item: int, least: int, most: int) -> int:
        """Repeats a term `least` to `most` times. A repeat of a repeat is one where the counts leave no gap."""
        if self.nullable[item]:
            least = 0
        if most == 0 or item in (EMPTY, NOTHING) or least > most:
            return EMPTY if least == 0 else NOTHING
        key = self.keys[item]
        if key[0] == REPEAT and (least == most or least * (key[3] - key[2]) >= key[2] - 1):
            return self.repeat(key[1], key[2] * least, min(key[3] * most, UNBOUNDED))
        if least == most == 1:
            return item
        low, high = self.lengths[item]
        lengths = (low * least, min(high * most, UNBOUNDED))
        return self._make((REPEAT, item, least, min(most, UNBOUNDED)), least == 0, self.plain[item], lengths)

    def choice(self, terms: Iterable[int]) -> int:
        """Returns any of the terms."""
        parts: set[int] = set()
        for term in terms:
            if self.keys[term][0] == CHOICE:
                parts.update(self.keys[term][1:])
            else:
                parts.add(term)
        self.spend(len(parts))
        if ANYTHING in parts:
            return ANYTHING
        has_empty = EMPTY in parts
        parts.discard(EMPTY)
        if len(parts) > 1:
            parts = self._merged(self._one_set(parts))
        if has_empty and not any(self.nullable[term] for term in parts):
            if len(parts) == 1:
                return self.repeat(parts.pop(), 0, 1)
            parts.add(EMPTY)
        if len(parts) == 1:
            return parts.pop()
        lengths = [self.lengths[term] for term in parts]
        return self._make(
            (CHOICE, *sorted(parts)),
            any(self.nullable[term] for term in parts),
            all(self.plain[term] for term in parts),
            (min((low for low, _ in lengths), default=UNBOUNDED), max((high for _, high in lengths), default=0)),
        )

    def _one_set(self, terms: set[int]) -> set[int]:
        """The character classes among them as one."""
        sets = [term for term in terms if self.keys[term][0] == SET]
        if len(sets) < 2:
            return terms
        atoms: frozenset[int] = frozenset().union(*(self.sets[self.keys[term][1]] for term in sets))
        return terms.difference(sets) | {self.one_of(atoms)}

    def _merged(self, terms: set[int]) -> set[int]:
        """x{a,b}y and x{c,d}y as one where the counts leave no gap; nothing that any text of its length already is."""
        groups: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for term in terms:
            head, rest = self.parted(term)
            item, least, most = _counted(self.keys, head)
            groups.setdefault((item, rest), []).append((least, most, term))
        for (item, rest), counts in groups.items():
            if len(counts) > 1:
                terms = terms.difference(term for *_, term in counts)
                spans = _spans(counts) if self.parted(rest)[0] != ANYTHING else [(min(counts)[0],) * 2]
                terms.update(self.chain(self.repeat(item, *span), rest) for span in spans)
        open_ended = [least for least, most, _ in groups.get((ANY, EMPTY), ()) if most == UNBOUNDED]
        if not open_ended:
            return terms
        kept = self.repeat(ANY, min(open_ended), UNBOUNDED)
        return {term for term in terms if self.lengths[term][0] < min(open_ended)} | {kept}

    def both(self, terms: Iterable[int]) -> int:
        """Returns the term that matches what all of them match."""
        parts: set[int] = set()
        for term in terms:
            if self.keys[term][0] == BOTH:
                parts.update(self.keys[term][1:])
            else:
                parts.add(term)
        self.spend(len(parts))
        parts = self._narrowed(parts - {ANYTHING})
        if EMPTY in parts:
            return EMPTY if all(self.nullable[term] for term in parts) else NOTHING
        if NOTHING in parts or any(self.keys[term][0] == NOT and self.keys[term][1] in parts for term in parts):
            return NOTHING
        if len(parts) < 2:
            return parts.pop() if parts else ANYTHING
        low = max(self.lengths[term][0] for term in parts)
        high = min(self.lengths[term][1] for term in parts)
        if low > high:
            return NOTHING
        nullable = all(self.nullable[term] for term in parts)
        return self._make((BOTH, *sorted(parts)), nullable, False, (low, high))

    def _narrowed(self, terms: set[int]) -> set[int]:
        """The repeats of character classes among them as one, left out where it only bounds a length that is kept."""
        runs = [term for term in terms if self.keys[_counted(self.keys, term)[0]][0] == SET]
        if not runs:
            return terms
        counts = [_counted(self.keys, term) for term in runs]
        atoms = frozenset.intersection(*(self.sets[self.keys[item][1]] for item, _, _ in counts))
        run = self.repeat(self.one_of(atoms), max(c[1] for c in counts), min(c[2] for c in counts))
        others = terms.difference(runs)
        if others and _counted(self.keys, run)[0] == ANY:
            low = max(self.lengths[term][0] for term in others)
            high = min(self.lengths[term][1] for term in others)
            if self.lengths[run][0] <= low and high <= self.lengths[run][1]:
                return others
        return others | {run} if run != ANYTHING else others

    def complement(self, term: int) -> int:
        """Returns the term that matches what it does not match."""
        key = self.keys[term]
        if key[0] == NOT:
            return key[1]
        if term == NOTHING:
            return ANYTHING
        item, least, most = (ANY, 0, 0) if term == EMPTY else _counted(self.keys, term)
        if item == ANY:
            shorter = self.repeat(ANY, 0, least - 1) if least else NOTHING
            return self.choice((shorter, self.repeat(ANY, most + 1, UNBOUNDED) if most < UNBOUNDED else NOTHING))
        nullable = not self.nullable[term]
        return self._make((NOT, term), nullable, False, (0 if nullable else 1, UNBOUNDED))


def _spans(counts: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The union of (least, most, …) as few such."""
    spans: list[tuple[int, int]] = []
    for least, most, *_ in sorted(counts):
        if spans and least <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], most))
        else:
            spans.append((least, most))
    return spans


def _counted(keys: Sequence[tuple[int, ...]], term: int) -> tuple[int, int, int]:
    """Returns item, least and most of a repeat; any other term occurs once."""
    key = keys[term]
    return (key[1], key[2], key[3]) if key[0] == REPEAT else (term, 1, 1)
