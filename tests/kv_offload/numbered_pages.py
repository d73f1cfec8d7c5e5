"""Pages in files, each made of its number."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tureen.contract.runner import KvSizes
from tureen.kv_offload.page_files import PREFIX_BYTES, NoPage, PageFiles

PAGE_BYTES = 100
FILE_BYTES = PREFIX_BYTES + PAGE_BYTES


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def page_of(number: int) -> memoryview:
    return memoryview(bytes([number % 256]) * PAGE_BYTES)


def read_page(files: PageFiles, number: int) -> bytes | None:
    buffer = bytearray(PAGE_BYTES)
    try:
        files.read(key_of(number), memoryview(buffer))
    except NoPage:
        return None
    return bytes(buffer)


def page_files_in(folder: Path, num_pages: int = 10) -> PageFiles:
    return PageFiles(folder / "pages", sizes=KvSizes(PAGE_BYTES), max_bytes=num_pages * FILE_BYTES)


def files_in(folder: Path) -> list[Path]:
    return [path for path in (folder / "pages").rglob("*") if path.is_file() and path.name != "usage"]
