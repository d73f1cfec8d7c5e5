"""Reads files that clients put into messages, if they are text."""

from __future__ import annotations

import base64
import binascii

from tureen.errors import InvalidRequest

DATA_URL = "data:"
PDF_TYPE, PDF_START = "application/pdf", "%PDF-"


def file_text(data: str, name: str | None, field: str, text_part: str) -> str:
    """Return a text file as the model reads it: its name on a line, and its text.

    `data`: the file in base64, as it is or as a data URL. `text_part`: the type of a part with text, for the error.
    Raises InvalidRequest with `field` for a file that is not text in UTF-8, and for a PDF.
    """
    head, _, encoded = data.partition(",") if data.startswith(DATA_URL) else ("", "", data)
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        text = None
    media_type = head.removeprefix(DATA_URL).partition(";")[0].strip().lower()
    if text is None or text.startswith(PDF_START) or media_type == PDF_TYPE:
        raise InvalidRequest(
            f"{field} is not a text file in base64 and UTF-8. The server does not read PDFs; send their text as a part "
            f"of type {text_part}",
            field=field,
            code="not_available",
        )
    return f"{name}:\n{text}" if name else text
