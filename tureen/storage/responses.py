"""Keeps responses and conversations of OpenAI's API, each client's apart from all others'.

A response is kept with the items it was asked with and the items it gave. What continues it names it, so a conversation
of any length is stored once. Whoever continues a response lets all that it continues live on.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from tureen.errors import InvalidRequest, NotFound, PayloadTooLarge, StartupError, TureenError, echo
from tureen.storage.conversations import ConversationStore, Item, items_up_to, last_item, number_of, put_items
from tureen.storage.database import Database, Schema, size_of
from tureen.storage.packing import Packed, pack, pack_bytes, unpack, unpack_bytes

FLAG = "--responses-store"
PREVIOUS, RESPONSE = "previous_response_id", "response_id"
"""Fields that name a response: of a body, of a path."""

RUNNING, ANSWERS = ("queued", "in_progress"), ("completed", "incomplete")
"""States of responses that are being made; of those that gave an answer, which may be continued."""
LOST = {
    "code": "server_error",
    "message": "the server ended while it generated this response; send the request again",
}
"""Error of a response whose generation was lost."""

ROOM_SHARE = 0.9
"""Share of the limit that is left in a file that has grown beyond it."""
NUM_DROPPED = 8  # responses and conversations that are dropped, at least, before the size is looked at again
PART_DROPPED = 64  # that part of a client's is dropped, at least: a look takes time for each row
LARGEST_SHARE = 4  # one response takes at most the limit divided by this

SCHEMA = Schema(
    version=1,
    flag=FLAG,
    script="""
CREATE TABLE conversations (
  number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL, created_s REAL NOT NULL,
  expires_s REAL NOT NULL, metadata BLOB NOT NULL, UNIQUE (owner, id));
CREATE TABLE items (
  number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, num_bytes INTEGER NOT NULL, id TEXT NOT NULL,
  conversation INTEGER NOT NULL REFERENCES conversations ON DELETE CASCADE, item BLOB NOT NULL);
CREATE INDEX items_of_a_conversation ON items (conversation, number);
CREATE INDEX bytes_of_items ON items (owner, num_bytes);
CREATE TABLE responses (
  number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL, status TEXT NOT NULL,
  expires_s REAL NOT NULL, num_bytes INTEGER NOT NULL, previous INTEGER, conversation INTEGER, after_item INTEGER,
  input BLOB NOT NULL, response BLOB NOT NULL, events BLOB, UNIQUE (owner, id));
CREATE INDEX responses_that_run ON responses (status);
CREATE INDEX responses_by_expiry ON responses (expires_s);
CREATE INDEX bytes_of_responses ON responses (owner, status, expires_s, num_bytes)
""",
)

CHAIN = """
WITH RECURSIVE chain (number, previous, conversation, after_item, depth) AS (
  SELECT number, previous, conversation, after_item, 0 FROM responses WHERE number = ?
  UNION ALL
  SELECT older.number, older.previous, older.conversation, older.after_item, depth + 1
  FROM responses AS older JOIN chain ON older.number = chain.previous)
"""
"""A response and all that it continues; the oldest is the deepest."""


Link = tuple[int, int | None, int | None]
"""A response in a chain: its number, its conversation, the last item of that before it."""


class Continued(NamedTuple):
    """A request continues a response, a conversation up to an item, or nothing. The numbers are the file's."""

    items: Sequence[Item] = ()
    previous: int | None = None
    conversation: int | None = None
    after_item: int | None = None


class KeptResponse(NamedTuple):
    """A response that was kept."""

    response: dict[str, Any]
    events: bytes | None  # its stream, for one that was made in the background with stream: true


class ResponseStore:
    """The file of --responses-store."""

    def __init__(
        self, path: str, *, ttl_s: float, max_bytes: int, max_context_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """`ttl_s`: seconds that a response is kept after it was made or continued; `max_bytes`: most bytes of the file;
        `max_context_bytes`: most bytes of all items that one request continues.

        Responses that were being made when the last server ended become failed ones. Raises StartupError.
        """
        self._database = Database(path, SCHEMA)
        self._clock, self._ttl_s = clock, ttl_s
        self._max_bytes = max_bytes
        self._max_context_bytes = max_context_bytes
        self.background: set[asyncio.Task[None]] = set()  # which make responses that no connection waits for
        self._num_changes = 0  # rows that were changed when `sweep` last looked
        self.conversations = ConversationStore(
            self._database, ttl_s=ttl_s, clock=clock, make_room=self._make_room, max_bytes=max_context_bytes
        )
        try:
            self._database.run_now(_fail_lost)
        except TureenError as error:
            self._database.close()
            raise StartupError(f"{FLAG} {path}: {error.message}") from None

    async def close(self) -> None:
        """Waits for what runs in the background, and closes the file."""
        await asyncio.gather(*self.background)
        self._database.close()

    def check_size(self, num_bytes: int) -> None:
        """Raises PayloadTooLarge for a request whose items are too large to be kept."""
        most = self._max_bytes // LARGEST_SHARE
        if num_bytes > most:
            raise PayloadTooLarge(
                f"the input has {num_bytes} bytes, and one response may take {most} of those that --responses-max-mib "
                "allows; send less, or store: false",
                field="input",
            )

    async def check_free(self, owner: str, name: str) -> None:
        """Raises InvalidRequest when the client has a response of this name, which a client may choose."""

        def check(connection: sqlite3.Connection) -> None:
            taken = "SELECT 1 FROM responses WHERE owner = ? AND id = ?"
            if connection.execute(taken, (owner, name)).fetchone():
                raise _taken(name)

        await self._database.run(check)

    async def add(self, owner: str, response: dict[str, Any], asked: Sequence[Item], continued: Continued) -> None:
        """Keeps a response, which is the answer as clients see it; one that has ended is appended to its conversation.

        `owner`: name of the client, "" = anonymous; `asked`: the items that the request sent.
        """

        def insert(connection: sqlite3.Connection) -> None:
            packed, packed_items = pack(response), pack(list(asked))
            num_bytes = packed.num_bytes + packed_items.num_bytes
            expires_s = self._clock() + self._ttl_s
            try:
                connection.execute(
                    "INSERT INTO responses (owner, id, status, expires_s, num_bytes, previous, conversation,"
                    " after_item, input, response) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        owner, response["id"], response["status"], expires_s, num_bytes,
                        continued.previous, continued.conversation, continued.after_item,
                        packed_items.blob, packed.blob,
                    ),
                )  # fmt: skip
            except sqlite3.IntegrityError:  # two were asked for at once
                raise _taken(response["id"]) from None
            renew = f"{CHAIN} UPDATE responses SET expires_s = ? WHERE number IN (SELECT number FROM chain)"
            connection.execute(renew, (continued.previous, expires_s))
            if continued.conversation is not None and response["status"] in ANSWERS:
                self._append(connection, owner, continued.conversation, [*asked, *response["output"]])
            self._make_room(connection)

        await self._database.run(insert)

    async def end(self, owner: str, response: dict[str, Any], events: bytes | None = None) -> None:
        """Keeps how a running response ended, and its stream. Does nothing when it was deleted meanwhile."""

        def update(connection: sqlite3.Connection) -> None:
            packed = pack(response)
            stream = Packed(b"", 0) if events is None else pack_bytes(events)
            row = connection.execute(
                "SELECT number, conversation, input FROM responses WHERE owner = ? AND id = ?", (owner, response["id"])
            ).fetchone()
            if row is None:
                return
            number, conversation, asked = row
            connection.execute(
                "UPDATE responses SET status = ?, response = ?, events = ?, num_bytes = num_bytes + ? WHERE number = ?",
                (response["status"], packed.blob, stream.blob or None, packed.num_bytes + stream.num_bytes, number),
            )
            if conversation is not None and response["status"] in ANSWERS:
                self._append(connection, owner, conversation, [*unpack(asked), *response["output"]])
            self._make_room(connection)

        await self._database.run(update)

    async def find(self, owner: str, name: str) -> KeptResponse:
        """Returns a response of the client. Raises NotFound."""

        def read(connection: sqlite3.Connection) -> KeptResponse:
            number = self._number(connection, owner, name, RESPONSE)
            query = "SELECT response, events FROM responses WHERE number = ?"
            response, events = connection.execute(query, (number,)).fetchone()
            return KeptResponse(unpack(response), None if events is None else unpack_bytes(events))

        return await self._database.run(read)

    async def delete(self, owner: str, name: str) -> None:
        """Forgets a response of the client. Raises NotFound."""

        def delete(connection: sqlite3.Connection) -> None:
            number = self._number(connection, owner, name, RESPONSE)
            connection.execute("DELETE FROM responses WHERE number = ?", (number,))

        await self._database.run(delete)

    async def items_of_request(self, owner: str, name: str) -> list[Item]:
        """Returns all items that a response was made of: those that it continues, then its own. Raises NotFound."""

        def read(connection: sqlite3.Connection) -> list[Item]:
            number = self._number(connection, owner, name, RESPONSE)
            older = self._chain(connection, number)
            own = connection.execute("SELECT input FROM responses WHERE number = ?", (number,)).fetchone()[0]
            return [*self._items(connection, older, but=number), *unpack(own)]

        return await self._database.run(read)

    async def items_named(self, owner: str, names: Sequence[str]) -> tuple[dict[str, Item], int]:
        """Returns items of the client by their ids, and the bytes that all names together stand for. Those that are
        not there are left out. Raises PayloadTooLarge for names of more than a request may have."""

        def read(connection: sqlite3.Connection) -> tuple[dict[str, Item], int]:
            known = _items(connection, owner, set(names), self._clock(), self._max_context_bytes)
            counts = Counter(name for name in names if name in known)
            num_bytes = sum(count * len(msgspec.json.encode(known[name])) for name, count in counts.items())
            self._check_bytes(num_bytes, "input")
            return known, num_bytes

        return await self._database.run(read)

    async def continued(self, owner: str, *, previous: str | None, conversation: str | None) -> Continued:
        """Returns what a new request continues: a response with all before it, or a conversation, by their ids.

        Raises NotFound, InvalidRequest for a response that cannot be continued, PayloadTooLarge.
        """

        def read(connection: sqlite3.Connection) -> Continued:
            if previous is not None:
                number = self._number(connection, owner, previous)
                _check_ended(connection, number, previous)
                return Continued(self._items(connection, self._chain(connection, number, PREVIOUS)), previous=number)
            if conversation is None:
                return Continued()
            number = number_of(connection, owner, conversation, self._clock())
            query = "SELECT sum(num_bytes) FROM items WHERE conversation = ?"
            self._check_bytes(connection.execute(query, (number,)).fetchone()[0], "conversation")
            last = last_item(connection, number)
            return Continued(items_up_to(connection, number, last), conversation=number, after_item=last)

        return await self._database.run(read)

    async def sweep(self) -> None:
        """Forgets what has been kept long enough, and what of it is still in SQLite's log."""

        def sweep(connection: sqlite3.Connection) -> bool:
            now = self._clock()
            connection.execute("DELETE FROM responses WHERE expires_s <= ? AND status NOT IN (?, ?)", (now, *RUNNING))
            connection.execute("DELETE FROM conversations WHERE expires_s <= ?", (now,))
            num_deleted = connection.total_changes - self._num_changes
            self._num_changes = connection.total_changes
            return num_deleted > 0

        if await self._database.run(sweep):
            await self._database.wipe()

    def _number(self, connection: sqlite3.Connection, owner: str, name: str, field: str = PREVIOUS) -> int:
        query = "SELECT number FROM responses WHERE owner = ? AND id = ? AND expires_s > ?"
        row = connection.execute(query, (owner, name, self._clock())).fetchone()
        if row is None:
            raise NotFound(
                f"there is no response {echo(name)}: it was not stored, or was deleted or dropped",
                field=field,
                code="previous_response_not_found" if field == PREVIOUS else "response_not_found",
            )
        return int(row[0])

    def _chain(self, connection: sqlite3.Connection, number: int, field: str = RESPONSE) -> list[Link]:
        """Returns number, conversation and last item before it of a response and of all that it continues, the oldest
        first. Raises NotFound, PayloadTooLarge."""
        rows = connection.execute(
            f"{CHAIN} SELECT number, previous, conversation, after_item FROM chain ORDER BY depth DESC", (number,)
        ).fetchall()
        _, previous, conversation, _ = rows[0]
        is_there = "SELECT 1 FROM conversations WHERE number = ?"
        if previous is not None or (
            conversation is not None and connection.execute(is_there, (conversation,)).fetchone() is None
        ):
            raise NotFound(
                "what this response continues was deleted, expired, or dropped to free space; start again with the "
                "whole conversation in input",
                field=field,
                code="previous_response_not_found",
            )
        query = f"{CHAIN} SELECT sum(num_bytes) FROM responses WHERE number IN (SELECT number FROM chain)"
        self._check_bytes(connection.execute(query, (number,)).fetchone()[0], field)
        return [(row[0], row[2], row[3]) for row in rows]

    def _check_bytes(self, num_bytes: int | None, field: str) -> None:
        if (num_bytes or 0) > self._max_context_bytes:
            raise PayloadTooLarge(
                f"{field}: what it continues or names has {num_bytes} bytes, but a request may have "
                f"{self._max_context_bytes} (--max-body-bytes); start again with less",
                field=field,
            )

    def _items(
        self,
        connection: sqlite3.Connection,
        chain: Sequence[tuple[int, int | None, int | None]],
        but: int | None = None,
    ) -> list[Item]:
        """Returns the items of a chain of responses; of the response `but` only those of the conversation before it."""
        items: list[Item] = []
        for number, conversation, after_item in chain:
            if conversation is not None:
                items = items_up_to(connection, conversation, after_item or 0)
            if number != but:
                query = "SELECT input, response FROM responses WHERE number = ?"
                asked, response = connection.execute(query, (number,)).fetchone()
                items += [*unpack(asked), *unpack(response)["output"]]
        return items

    def _append(self, connection: sqlite3.Connection, owner: str, conversation: int, items: Sequence[Item]) -> None:
        """Appends items to a conversation; a call that was cut short could not be continued, and is left out."""
        is_there = connection.execute(
            "UPDATE conversations SET expires_s = ? WHERE number = ?", (self._clock() + self._ttl_s, conversation)
        ).rowcount
        if is_there:
            put_items(connection, owner, conversation, [item for item in items if not is_cut_call(item)])

    def _make_room(self, connection: sqlite3.Connection) -> None:
        if size_of(connection) > self._max_bytes:
            _drop_oldest(connection, int(ROOM_SHARE * self._max_bytes))


def _drop_oldest(connection: sqlite3.Connection, most_bytes: int) -> None:
    """Drops what expires first of the client that has most, again and again, until the file has `most_bytes`."""
    while size_of(connection) > most_bytes:
        largest = connection.execute(
            "SELECT owner, sum(is_row) FROM (SELECT owner, num_bytes, 1 AS is_row FROM responses WHERE status NOT IN"
            " (?, ?) UNION ALL SELECT owner, num_bytes, 0 FROM items UNION ALL SELECT owner, length(metadata), 1 FROM"
            " conversations) GROUP BY owner ORDER BY sum(num_bytes) DESC LIMIT 1",
            RUNNING,
        ).fetchone()
        if largest is None:
            return
        owner, count = largest
        oldest = connection.execute(
            "SELECT 0 AS kind, number, expires_s FROM responses WHERE owner = ? AND status NOT IN (?, ?) UNION ALL"
            " SELECT 1, number, expires_s FROM conversations WHERE owner = ? ORDER BY expires_s, number LIMIT ?",
            (owner, *RUNNING, owner, max(NUM_DROPPED, count // PART_DROPPED)),
        ).fetchall()
        for kind, number, _ in oldest:
            table = ("responses", "conversations")[kind]
            connection.execute(f"DELETE FROM {table} WHERE number = ?", (number,))


def _items(
    connection: sqlite3.Connection, owner: str, ids: Collection[str], now_s: float, most_bytes: int
) -> dict[str, Item]:
    """Returns a client's items by id: those of its conversations, and of its newest responses, up to
    `most_bytes` of these."""
    query = (
        "SELECT items.id, items.item FROM items JOIN conversations ON conversations.number = items.conversation"
        " WHERE items.owner = ? AND items.id IN (SELECT value FROM json_each(?)) AND conversations.expires_s > ?"
    )
    rows = connection.execute(query, (owner, msgspec.json.encode(ids).decode(), now_s))
    known: dict[str, Item] = {name: unpack(item) for name, item in rows}
    newest = "SELECT num_bytes, input, response FROM responses WHERE owner = ? AND expires_s > ? ORDER BY number DESC"
    for num_bytes, asked, response in connection.execute(newest, (owner, now_s)):
        most_bytes -= num_bytes
        if most_bytes < 0 or len(known) == len(ids):
            break
        items = [*unpack(asked), *unpack(response)["output"]]
        known |= {item["id"]: item for item in items if item["id"] in ids}
    return known


def _taken(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"rid {echo(name)} is the id of a stored response; choose another, or leave it out",
        field="rid",
        code="duplicate_rid",
    )


def is_cut_call(item: Item) -> bool:
    """Returns whether an item is a call of a tool that was cut short."""
    return item.get("type") in ("function_call", "custom_tool_call") and item.get("status") == "incomplete"


def _check_ended(connection: sqlite3.Connection, number: int, name: str) -> None:
    """Raises InvalidRequest for a response that runs or that gave no whole answer."""
    status, packed = connection.execute("SELECT status, response FROM responses WHERE number = ?", (number,)).fetchone()
    why = None
    if status in RUNNING:
        why = "has not finished yet; poll it until it has"
    elif status not in ANSWERS:
        why = f"ended as {status}; continue the response before it"
    elif status == "incomplete" and any(map(is_cut_call, unpack(packed)["output"])):
        why = "was cut in the middle of a tool call; continue the response before it"
    if why is not None:
        raise InvalidRequest(f"previous_response_id: the response {echo(name)} {why}", field=PREVIOUS)


def _fail_lost(connection: sqlite3.Connection) -> None:
    """Makes failed responses of those that were running when the last server ended."""
    query = f"SELECT number, response FROM responses WHERE status IN {RUNNING}"
    for number, packed in connection.execute(query).fetchall():
        response = pack(unpack(packed) | {"status": "failed", "error": LOST}).blob
        update = "UPDATE responses SET status = 'failed', response = ? WHERE number = ?"
        connection.execute(update, (response, number))
