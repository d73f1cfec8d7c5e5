"""Names the parts of an installation that only some settings need, and says how to install one that is missing.

Imports: errors.
Imported by: all.
"""

from __future__ import annotations

import importlib.util

from tureen.errors import StartupError

EXTRAS = {
    "torch": "torch",
    "transformers": "torch",
    "PIL": "torch",
    "cryptography": "tls",
    "ray": "ray",
    "opentelemetry.sdk": "otel",
    "opentelemetry.exporter.otlp.proto.http": "otel",
}
"""Module -> the extra of pyproject.toml that installs it."""


def is_installed(module: str) -> bool:
    """Says whether the module could be imported. Does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # somebody hides it
        return False


def require(what: str, *modules: str, field: str | None = None) -> None:
    """Raises StartupError for the first of these modules that is not installed: one line with the command for it.

    what: the setting or the kind of model that needs them. field: the setting's name.
    """
    for module in modules:
        if not is_installed(module):
            command = f"pip install 'tureen[{EXTRAS[module]}]'"
            raise StartupError(f"{what} needs {module}, which is not installed: {command}", field=field)
