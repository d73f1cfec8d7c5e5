"""Reads files that clients put into messages, if they are text."""

from __future__ import annotations

import base64
import binascii

from tureen.errors import InvalidRequest

DATA_URL = "data:"


def file_text(data: str, name: str | None, field: str) -> str:
    """Return a text file as the model reads it: its name on a line, and its text.

    `data`: the file in base64, as it is or as a data URL. Raises InvalidRequest with `field` for a file that is not
    text in UTF-8, such as a PDF.
    """
    encoded = data.partition(",")[2] if data.startswith(DATA_URL) else data
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            f"{field} is not base64 of UTF-8 text. The server does not read other files, such as PDFs: send their text",
            field=field,
            code="not_available",
        ) from None
    return f"{name}:\n{text}" if name else text
