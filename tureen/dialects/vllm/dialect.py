"""vLLM's `/inference/v1/generate`: token ids in, token ids out."""

from __future__ import annotations

from tureen.dialects.vllm import generate
from tureen.dialects.vllm.generate import ALIASES, TABLES, VllmParams, VllmTokensBody
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect

PAGE = "See [training loops](operations.md#training-loops)."

DIALECT = Dialect(
    order=55,
    routes=generate.routes,
    compat=(
        CompatRoute(
            "vLLM",
            "/inference/v1/generate",
            (
                BodyPart(VllmTokensBody, TABLES["body"]),
                BodyPart(VllmParams, TABLES["sampling_params"], "sampling_params", ALIASES),
            ),
        ),
    ),
    sections=(
        BodySection("`POST /inference/v1/generate`", PAGE, VllmTokensBody),
        BodySection("`sampling_params` of `/inference/v1/generate`", PAGE, VllmParams),
    ),
)
