"""Writes pydantic_schemas.json: the schemas that pydantic and OpenAI's client make of the models."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, TypeAdapter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pydantic_models import MODELS


def schemas_of(model: Any) -> dict[str, Any]:
    """Returns the schema of pydantic, and that of `client.chat.completions.parse(response_format=model)`."""
    plain = TypeAdapter(model)
    is_model = inspect.isclass(model) and issubclass(model, BaseModel)
    return {"pydantic": plain.json_schema(), "openai": to_strict_json_schema(model if is_model else plain)}


if __name__ == "__main__":
    schemas = {name: schemas_of(model) for name, model in MODELS.items()}
    file = Path(__file__).with_name("pydantic_schemas.json")
    file.write_text(json.dumps(schemas, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
