"""Pictures as files and as fields of requests have them."""

from __future__ import annotations

import base64
import io


def stored(picture, kind="PNG", **options):
    """A picture's bytes, as a file has them."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def base64_of(data):
    return base64.b64encode(data).decode()
