"""MindIE's and vLLM's dialect of `/generate`."""

from __future__ import annotations

from tureen.dialects.mindie import generate as mindie
from tureen.dialects.mindie.generate import TABLE, MindieBody
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect, GenerateForm

DIALECT = Dialect(
    order=20,
    routes=lambda _: [],
    compat=(CompatRoute("MindIE and vLLM's demo server", "/generate", (BodyPart(MindieBody, TABLE),)),),
    sections=(
        BodySection(
            "`POST /generate`, the dialect of MindIE and vLLM", "See [MindIE and vLLM](mindie.md).", MindieBody
        ),
    ),
    generate=GenerateForm(("prompt",), MindieBody, mindie.respond, refuse=mindie.as_mindie),
)
