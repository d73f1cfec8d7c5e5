"""Keeps OpenAI's conversations: lists of items that responses read, and append to."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from tureen.errors import NotFound, PayloadTooLarge, echo
from tureen.storage.database import Database
from tureen.storage.packing import pack, unpack

Item = dict[str, Any]


class ConversationStore:
    """The conversations of the file of --responses-store. Methods raise NotFound for what is not the client's own."""

    def __init__(
        self,
        database: Database,
        *,
        ttl_s: float,
        clock: Callable[[], float],
        make_room: Callable[[sqlite3.Connection], None],
        max_bytes: int,
    ) -> None:
        """`ttl_s`: seconds that a conversation is kept after it last grew; `make_room` drops what is oldest;
        `max_bytes`: most bytes of its items to which a client may append more."""
        self._database = database
        self._ttl_s = ttl_s
        self._clock = clock
        self._make_room = make_room
        self._max_bytes = max_bytes

    async def add(self, owner: str, name: str, metadata: dict[str, str], items: Sequence[Item]) -> dict[str, Any]:
        """Makes a conversation and returns it."""
        now = self._clock()

        def insert(connection: sqlite3.Connection) -> None:
            number = connection.execute(
                "INSERT INTO conversations (owner, id, created_s, expires_s, metadata) VALUES (?, ?, ?, ?, ?)",
                (owner, name, now, now + self._ttl_s, pack(metadata).blob),
            ).lastrowid
            put_items(connection, owner, number or 0, items)
            self._make_room(connection)

        await self._database.run(insert)
        return _conversation(name, now, metadata)

    async def find(self, owner: str, name: str) -> dict[str, Any]:
        """Returns a conversation."""

        def read(connection: sqlite3.Connection) -> dict[str, Any]:
            number = number_of(connection, owner, name, self._clock())
            query = "SELECT created_s, metadata FROM conversations WHERE number = ?"
            created_s, metadata = connection.execute(query, (number,)).fetchone()
            return _conversation(name, created_s, unpack(metadata))

        return await self._database.run(read)

    async def describe(self, owner: str, name: str, metadata: dict[str, str]) -> dict[str, Any]:
        """Replaces the metadata of a conversation and returns it."""

        def update(connection: sqlite3.Connection) -> None:
            number = number_of(connection, owner, name, self._clock())
            connection.execute("UPDATE conversations SET metadata = ? WHERE number = ?", (pack(metadata).blob, number))

        await self._database.run(update)
        return await self.find(owner, name)

    async def delete(self, owner: str, name: str) -> None:
        """Forgets a conversation and its items."""

        def delete(connection: sqlite3.Connection) -> None:
            number = number_of(connection, owner, name, self._clock())
            connection.execute("DELETE FROM conversations WHERE number = ?", (number,))

        await self._database.run(delete)

    async def add_items(self, owner: str, name: str, items: Sequence[Item]) -> None:
        """Appends items. Raises PayloadTooLarge for a conversation that no request could continue, for its length."""

        def insert(connection: sqlite3.Connection) -> None:
            now = self._clock()
            number = number_of(connection, owner, name, now)
            put_items(connection, owner, number, items)
            query = "SELECT sum(num_bytes) FROM items WHERE conversation = ?"
            num_bytes = connection.execute(query, (number,)).fetchone()[0] or 0
            if num_bytes > self._max_bytes:
                raise PayloadTooLarge(
                    f"items: the conversation would have {num_bytes} bytes, more than the {self._max_bytes} that a "
                    "request may continue (--max-body-bytes); create another",
                    field="items",
                )
            renew = "UPDATE conversations SET expires_s = ? WHERE number = ?"
            connection.execute(renew, (now + self._ttl_s, number))
            self._make_room(connection)

        await self._database.run(insert)

    async def items(self, owner: str, name: str) -> list[Item]:
        """Returns all items, the oldest first."""

        def read(connection: sqlite3.Connection) -> list[Item]:
            number = number_of(connection, owner, name, self._clock())
            return items_up_to(connection, number, last_item(connection, number))

        return await self._database.run(read)

    async def item(self, owner: str, name: str, item_id: str) -> Item:
        """Returns an item of a conversation."""

        def read(connection: sqlite3.Connection) -> Item:
            number = self._item_number(connection, owner, name, item_id)
            packed = connection.execute("SELECT item FROM items WHERE number = ?", (number,)).fetchone()[0]
            item: Item = unpack(packed)
            return item

        return await self._database.run(read)

    async def delete_item(self, owner: str, name: str, item_id: str) -> None:
        """Forgets an item of a conversation."""

        def delete(connection: sqlite3.Connection) -> None:
            number = self._item_number(connection, owner, name, item_id)
            connection.execute("DELETE FROM items WHERE number = ?", (number,))

        await self._database.run(delete)

    def _item_number(self, connection: sqlite3.Connection, owner: str, name: str, item_id: str) -> int:
        conversation = number_of(connection, owner, name, self._clock())
        query = "SELECT number FROM items WHERE conversation = ? AND id = ?"
        row = connection.execute(query, (conversation, item_id)).fetchone()
        if row is None:
            raise NotFound(
                f"the conversation {echo(name)} has no item {echo(item_id)}", field="item_id", code="item_not_found"
            )
        return int(row[0])


def _conversation(name: str, created_s: float, metadata: dict[str, str]) -> dict[str, Any]:
    return {"id": name, "object": "conversation", "created_at": int(created_s), "metadata": metadata}


def number_of(connection: sqlite3.Connection, owner: str, name: str, now_s: float) -> int:
    """Returns the number of a client's conversation. Raises NotFound."""
    query = "SELECT number FROM conversations WHERE owner = ? AND id = ? AND expires_s > ?"
    row = connection.execute(query, (owner, name, now_s)).fetchone()
    if row is None:
        raise NotFound(
            f"there is no conversation {echo(name)}: it never existed, or was deleted or dropped",
            field="conversation",
            code="conversation_not_found",
        )
    return int(row[0])


def put_items(connection: sqlite3.Connection, owner: str, conversation: int, items: Sequence[Item]) -> None:
    """Appends items to a conversation."""
    connection.executemany(
        "INSERT INTO items (owner, conversation, id, item, num_bytes) VALUES (?, ?, ?, ?, ?)",
        [(owner, conversation, item["id"], *pack(item)) for item in items],
    )


def last_item(connection: sqlite3.Connection, conversation: int) -> int:
    """Returns the number of the newest item of a conversation, 0 without one."""
    query = "SELECT max(number) FROM items WHERE conversation = ?"
    return int(connection.execute(query, (conversation,)).fetchone()[0] or 0)


def items_up_to(connection: sqlite3.Connection, conversation: int, last: int) -> list[Item]:
    """Returns the items of a conversation up to number `last`, the oldest first."""
    query = "SELECT item FROM items WHERE conversation = ? AND number <= ? ORDER BY number"
    return [unpack(packed) for (packed,) in connection.execute(query, (conversation, last))]
