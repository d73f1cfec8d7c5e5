"""Chooses the replica that a request goes to, by what each has in its prefix cache and by its load.

Nothing here has a clock or draws a number: the same calls in the same order choose the same replicas.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tureen.contract.types import GenerateRequest

MOST_NEWS = 16_384  # pages of one replica that other fronts are told of at a time; the newest
OVERLOAD = 1.25
"""The share of the mean load above which a replica gets no request for the sake of its cache."""


class Standing(NamedTuple):
    """A replica as the choice sees it."""

    number: int
    load: float  # tokens that it is to compute
    num_given: int  # tokens that it was ever given to compute
    num_known: int = 0  # pages of the request's prompt that it is likely to have cached


def choose(standings: Sequence[Standing], cost: float) -> int:
    """Returns the number of the replica that has the longest prefix of a request, among those that carry at most
    OVERLOAD times the mean load; of several such the one with the least load, then the one that was given least.

    cost: tokens that the request itself makes some replica compute, which count in the mean. `standings`: of the
    replicas that may be chosen, at least one.
    """
    limit = OVERLOAD * (sum(standing.load for standing in standings) + cost) / len(standings)
    fit = [standing for standing in standings if standing.load <= limit] or standings
    return min(fit, key=lambda standing: (-standing.num_known, standing.load, standing.num_given)).number


class PrefixIndex:
    """Remembers which pages each replica was given, newest last, no more than its cache holds. It is a hint: the
    replicas are not asked.

    A page is known by a hash of itself and all pages before it, which is the same in every process. Two that collide
    cost a worse choice and nothing else.
    """

    def __init__(self, num_replicas: int, page_size: int, most_pages: int) -> None:
        """most_pages: of one replica."""
        self._page_size = page_size
        self._most_pages = most_pages
        self._holders: dict[int, int] = {}  # page -> replicas that have it, one bit each
        self._pages = [OrderedDict[int, None]() for _ in range(num_replicas)]
        self._news: list[deque[int]] = []  # of each replica, where other fronts are to be told

    def __len__(self) -> int:
        """The number of pages, each counted once."""
        return len(self._holders)

    def pages_of(self, request: GenerateRequest, output_ids: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Returns the pages of a prompt and its output that may be cached: whole ones, and never the last token."""
        size, token_ids = self._page_size, request.token_ids + output_ids
        if request.embeds:
            return ()
        page = zlib.crc32(repr(request.cache_space).encode("utf-8", "backslashreplace"))
        pages = []
        for start in range(0, len(token_ids) - size, size):
            page = hash((page, token_ids[start : start + size]))
            pages.append(page)
        return tuple(pages)

    def num_known(self, pages: Iterable[int]) -> list[int]:
        """Returns how many of the first pages each replica has."""
        known = [0] * len(self._pages)
        mask = (1 << len(self._pages)) - 1
        for depth, page in enumerate(pages, 1):
            mask &= self._holders.get(page, 0)
            if not mask:
                break
            rest = mask
            while rest:
                bit = rest & -rest
                known[bit.bit_length() - 1] = depth
                rest ^= bit
        return known

    def give(self, number: int, pages: Sequence[int]) -> None:
        """Notes that a replica has these pages from now on. The last pages of a prompt go before its first."""
        is_news = self._add(number, reversed(pages))
        if self._news and is_news:
            self._news[number].extend(reversed(pages))  # all of them: who has forgotten the first could use no other

    def share(self) -> None:
        """Notes from now on what the indices of other fronts do not know."""
        self._news = [deque(maxlen=MOST_NEWS) for _ in self._pages]

    def take_news(self) -> list[list[int]]:
        """Returns the pages that each replica was given since the last call, for `hear` of other indices."""
        news = [list(pages) for pages in self._news]
        for pages in self._news:
            pages.clear()
        return news

    def hear(self, news: Sequence[Sequence[int]]) -> None:
        """Notes what each replica was given by another front."""
        for number, pages in enumerate(news):
            self._add(number, pages)

    def _add(self, number: int, pages: Iterable[int]) -> bool:
        """Makes these pages the newest of a replica, the last of them above all. Returns whether any is new to it."""
        own, bit = self._pages[number], 1 << number
        is_new = False
        for page in pages:
            if page in own:
                own.move_to_end(page)
            else:
                own[page] = None
                self._holders[page] = self._holders.get(page, 0) | bit
                is_new = True
        while len(own) > self._most_pages:
            self._drop(own.popitem(last=False)[0], bit)
        return is_new

    def forget(self, number: int) -> None:
        """Notes that a replica has nothing any more."""
        own = self._pages[number]
        for page in own:
            self._drop(page, 1 << number)
        own.clear()
        if self._news:
            self._news[number].clear()

    def _drop(self, page: int, bit: int) -> None:
        holders = self._holders[page] & ~bit
        if holders:
            self._holders[page] = holders
        else:
            del self._holders[page]
