"""Summarises the prefix cache for people: the lengths of its branches, and how many requests share them. It has no
tokens."""

from __future__ import annotations

import heapq
from itertools import islice
from typing import NamedTuple

from tureen.cache.manager import CacheManager
from tureen.cache.radix import RadixNode

MOST_LOOKS = 4096
"""Maximum number of visited nodes, so that a large cache does not delay steps."""
MOST_BRANCHES = 64
MOST_CHILDREN = 256
"""Maximum number of reported branches, and of visited children of a node, the newest ones."""


class Branch(NamedTuple):
    """A piece of the tree that does not fork, and whose nodes have the same number of holders."""

    parent: int  # index of the parent branch; -1: it begins a prompt
    page: int  # number of its first page: the same branch as long as it is cached
    num_tokens: int
    num_holders: int  # running requests that hold it
    num_children: int  # number of different continuations


class CacheSummary(NamedTuple):
    """The branches that most requests hold, parents first."""

    branches: list[Branch]
    num_left_out: int  # visited branches that are not reported; others may be below them


def summarise(cache: CacheManager) -> CacheSummary:
    """Returns the tree's branches. Among possible next branches, chooses the one that most requests hold."""
    page_size, looks_left = cache.page_size, MOST_LOOKS
    branches: list[Branch] = []
    coming: list[tuple[int, int, RadixNode, int]] = []  # negative holders, number, node, index of its parent
    num_pushed = num_unseen = 0

    def push_children(node: RadixNode, parent: int) -> None:
        nonlocal num_pushed, num_unseen, looks_left
        num_unseen += max(0, len(node.children) - MOST_CHILDREN)
        for child in islice(reversed(node.children.values()), MOST_CHILDREN):
            num_pushed += 1
            looks_left -= 1
            heapq.heappush(coming, (1 - cache.pool.count(child.page), num_pushed, child, parent))

    push_children(cache.tree.root, -1)
    while coming and len(branches) < MOST_BRANCHES and looks_left > 0:
        held, _, first, parent = heapq.heappop(coming)
        last, num_pages = first, 1
        while len(last.children) == 1 and looks_left > 0:
            (only,) = last.children.values()
            if 1 - cache.pool.count(only.page) != held:
                break
            last, num_pages = only, num_pages + 1
            looks_left -= 1
        branches.append(Branch(parent, first.page, num_pages * page_size, -held, len(last.children)))
        push_children(last, len(branches) - 1)
    return CacheSummary(branches, len(coming) + num_unseen)
