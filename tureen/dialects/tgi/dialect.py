"""TGI's API: `/generate`, `/generate_stream` and `POST /`."""

from __future__ import annotations

from tureen.dialects.tgi import generate as tgi
from tureen.dialects.tgi.generate import TABLES, TgiBody, TgiParameters
from tureen.http.dialect import BodyPart, BodySection, CompatRoute, Dialect, GenerateForm

DIALECT = Dialect(
    order=30,
    routes=tgi.routes,
    compat=(
        CompatRoute(
            "TGI",
            "/generate",
            (BodyPart(TgiBody, TABLES["body"]), BodyPart(TgiParameters, TABLES["parameters"], "parameters")),
        ),
    ),
    sections=(
        BodySection("`POST /generate`, TGI's dialect", "See [TGI](tgi.md).", TgiBody),
        BodySection("`parameters` of TGI's dialect", "See [TGI](tgi.md).", TgiParameters),
    ),
    generate=GenerateForm(("inputs",), TgiBody, tgi.respond),
)
