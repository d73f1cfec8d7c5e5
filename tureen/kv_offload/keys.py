"""Names KV pages by a digest of all that their bytes depend on: the identity of what computes, the salt, the adapter,
and every token up to the page's end."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from tureen.cache.radix import Key, Namespace, RadixNode

WIDTH = 2  # strings of a namespace, in front of the tokens of a first page


class PageKeys:
    """Computes the keys of pages for one identity and the adapters that are loaded."""

    def __init__(self, identity: bytes) -> None:
        self._identity = identity
        self._adapters: dict[str, bytes] = {"": b""}  # as namespaces name them -> digest

    def add_adapter(self, name: str, digest: bytes) -> None:
        """Notes which adapter a namespace means by `name`."""
        self._adapters[name] = digest

    def with_identity(self, identity: bytes) -> PageKeys:
        """Returns the same for other weights."""
        keys = PageKeys(identity)
        keys._adapters = self._adapters
        return keys

    def of_nodes(self, nodes: Sequence[RadixNode]) -> list[bytes]:
        """Returns the keys of nodes that follow each other from the root on; none for an adapter that is not known."""
        keys: list[bytes] = []
        for node in nodes:
            if keys:
                keys.append(follow(keys[-1], node.key))
            elif (first := self._first(node.key[:WIDTH], node.key[WIDTH:])) is not None:
                keys.append(first)
            else:
                return []
        return keys

    def after(
        self, keys: Sequence[bytes], namespace: Namespace, token_ids: Sequence[int], page_size: int, index: int
    ) -> bytes | None:
        """Returns the key of page number `index` of these tokens, whose earlier pages have `keys`; None for an adapter
        that is not known."""
        chunk = token_ids[index * page_size : (index + 1) * page_size]
        return follow(keys[-1], chunk) if index else self._first(namespace, chunk)

    def _first(self, namespace: Sequence[int | str], chunk: Sequence[int | str]) -> bytes | None:
        salt, adapter = map(str, namespace)
        digest = self._adapters.get(adapter)
        if digest is None:
            return None
        parts = (self._identity, salt.encode("utf-8", "surrogatepass"), digest)
        root = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
        return follow(root, chunk)


def of_state(key: bytes) -> bytes:
    """Returns the key of the state after the page that has this key."""
    return hashlib.sha256(key + b"state").digest()  # no page's: the tokens of a page are a multiple of 8 bytes


def of_window(key: bytes) -> bytes:
    """Returns the key of the window page of the same tokens as the page that has this key."""
    return hashlib.sha256(key + b"window").digest()


def follow(before: bytes, chunk: Key | Sequence[int | str]) -> bytes:
    """Returns the key of the page with these tokens behind the page that has the key `before`."""
    return hashlib.sha256(before + struct.pack(f"<{len(chunk)}q", *chunk)).digest()
