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
    "PIL": "vision",
    "cryptography": "tls",
    "ray": "ray",
    "av": "video",
    "gguf": "gguf",
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
            raise StartupError(f"{what} needs {module}, which is not installed: {_command(module)}", field=field)


def why_missing(module: str) -> str:
    """Return the error for a module that Python did not find, with the command that installs it."""
    return f"{module} is not installed: {_command(module)}"


def _command(module: str) -> str:
    """Return the command that installs a module: an extra, or tureen's own dependencies again."""
    names = [name for name in EXTRAS if f"{module}.".startswith(f"{name}.") or name.startswith(f"{module}.")]
    return f"pip install 'tureen[{EXTRAS[names[0]]}]'" if names else "pip install --force-reinstall tureen"
