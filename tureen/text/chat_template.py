"""What --chat-template may be."""

from __future__ import annotations

from pathlib import Path

from tureen.errors import StartupError, echo

NAMES = ("chatml-llava", "vicuna_v1.1")
SUFFIX = ".jinja"


def check_chat_template(given: str | None) -> None:
    """Raises StartupError for a name that is not known, and for a file that is not there."""
    if given is None or given in NAMES:
        return
    if not given.endswith(SUFFIX):
        raise StartupError(
            f"--chat-template {echo(given)}: there is no such template; use {', '.join(NAMES)} or a {SUFFIX} file",
            field="chat_template",
        )
    if not Path(given).expanduser().is_file():
        raise StartupError(f"--chat-template {given}: there is no such file", field="chat_template")
