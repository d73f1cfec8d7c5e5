"""Writes the settings into the schema of the Helm chart's values, so that the chart takes those that the server has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tureen.config import Config

CHART = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "tureen"
SET_BY_THE_CHART = {
    *("model_path", "host", "port", "uds", "engine", "drain_timeout_s", "download_dir"),
    *("api_key", "admin_api_key", "api_key_file"),
    *(name for name in Config.__struct_fields__ if name.startswith("tls_")),
}
"""Settings that have a value of their own in the chart, or that its probes rely on: they ask without TLS."""


def chart_schema() -> str:
    """Returns values.schema.json as it should be: as it is, with the settings of the server in it."""
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    settings = msgspec.json.schema(Config)["$defs"]["Config"]["properties"]
    schema["properties"]["settings"] = {
        "description": "Written by tools/docs.py (`make docs`): docs/settings.md",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name.replace("_", "-"): setting for name, setting in settings.items() if name not in SET_BY_THE_CHART
        },
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
