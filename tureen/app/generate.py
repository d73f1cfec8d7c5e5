"""Serves `/generate`, a path that several dialects share: the field with the prompt selects the dialect."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from tureen.errors import InvalidRequest
from tureen.fields.body import read_json
from tureen.http.dialect import PLAIN_ERROR, Docs, Entry, GenerateForm, dialects
from tureen.requests.state import ServerState


def prompt_fields() -> dict[str, GenerateForm]:
    """Returns the fields that may hold the prompt, each with its dialect's form."""
    forms = [dialect.generate for dialect in dialects() if dialect.generate is not None]
    return {name: form for form in forms for name in form.prompt_fields}


def routes(state: ServerState) -> list[Entry]:
    """Returns the route."""
    forms = prompt_fields()

    async def generate(request: Request) -> ASGIApp:
        body = read_json(request.headers.get("content-type"), await request.body())
        sent = [name for name in forms if body.get(name) is not None]
        if len(sent) == 1:
            return await forms[sent[0]].respond(body, request, state)
        error = InvalidRequest(
            f"send exactly one of {', '.join(forms)}; got {' and '.join(sent) or 'none of them'}",
            field=sent[-1] if sent else next(iter(forms)),
        )
        for name in sent:
            refuse = forms[name].refuse
            if refuse is not None:
                return refuse(error)
        raise error

    docs = Docs(
        "Generate",
        "Generate text. The field that holds the prompt selects the API: SGLang, MindIE and vLLM, or TGI.",
        bodies=tuple(dict.fromkeys(form.body for form in forms.values())),
        example={"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
        stream="text/event-stream",
        error=PLAIN_ERROR,
    )
    return [Entry("/generate", generate, access="user", methods=["POST", "PUT"], docs=docs)]
