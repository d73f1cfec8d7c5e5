"""Makes the answers and streams of `/completion`, and llama.cpp's form of errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from tureen.contract.types import FinishReason
from tureen.dialects.llamacpp.body import PARAMETERS, SHOWN_PARAMETERS, LlamaOptions
from tureen.errors import TureenError
from tureen.http.dialect import ErrorShape
from tureen.http.errors import error_answer
from tureen.requests.generation import Output
from tureen.requests.state import Context
from tureen.requests.timings import PromptProgress, timings

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}
LLAMA_ERROR = ErrorShape(
    "LlamaError",
    {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "type"],
                "properties": {
                    "code": {"type": "integer"},
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                },
            }
        },
    },
)

Answer = dict[str, Any]


def error_object(error: TureenError) -> Answer:
    """Return an error in llama.cpp's JSON form."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    if error.code in ("context_length_exceeded", "context_exceeded"):
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": error.message, "type": kind}}


def error_response(error: TureenError) -> Response:
    """Return an error as an answer with llama.cpp's body."""
    return error_answer(error, error_object(error))


class CompletionAnswer:
    """Makes the answer for one output, whole or piece by piece."""

    def __init__(self, output: Output, body: LlamaOptions, context: Context) -> None:
        self._output = output
        self._body = body
        self._context = context
        self._progress = PromptProgress(output)
        self._chars = 0
        self._tokens = 0

    def whole(self) -> Answer:
        """Return the whole answer."""
        output = self._output
        return self._picked(
            {
                "index": output.index,
                "content": output.text,
                "tokens": output.token_ids if self._body.return_tokens else [],
            }
            | self._ending()
            | self._probabilities(0)
        )

    def new_parts(self) -> Iterator[Answer]:
        """Yield the progress of the prompt, the new text, and at the end an event with what an answer says of the whole
        output."""
        output = self._output
        if progress := self._progress.new():
            yield self._part("", [], 0) | progress
        if len(output.text) > self._chars or (output.finish is None and len(output.token_ids) > self._tokens):
            part = self._part(output.text[self._chars :], output.token_ids[self._tokens :], len(output.token_ids))
            if self._body.timings_per_token:
                part["timings"] = timings(self._output)
            part |= self._probabilities(self._tokens)
            self._chars, self._tokens = len(output.text), len(output.token_ids)
            yield part
        if output.finish is not None:
            rest = self._probabilities(self._tokens) if self._tokens < len(output.token_ids) else {}
            left = {"index": output.index, "content": "", "tokens": output.token_ids[self._tokens :]}
            yield self._picked(left | self._ending() | rest)

    def _part(self, text: str, token_ids: list[int], num_predicted: int) -> Answer:
        return {
            "index": self._output.index,
            "content": text,
            "tokens": token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": self._output.usage.prompt_tokens,
        }

    def _ending(self) -> Answer:
        output, tokenizer = self._output, self._context.tokenizer
        stop_type, word = _stop(output.finish)
        return {
            "id_slot": -1,
            "stop": True,
            "model": self._body.model or self._context.info.model_name,
            "tokens_predicted": len(output.token_ids),
            "tokens_evaluated": output.usage.prompt_tokens,
            "generation_settings": settings_of(output, self._body, self._context),
            "prompt": tokenizer.decode(
                [max(0, token_id) for token_id in output.request.token_ids], skip_special_tokens=False
            ),
            "has_new_line": "\n" in output.text,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": output.usage.cached_tokens,
            "timings": timings(self._output),
            **output.constraint_notes,
        }

    def _probabilities(self, first: int) -> Answer:
        """Return the log-probabilities of the tokens from index `first` on, if the body asks for them."""
        if not self._body.n_probs:
            return {}
        entries = []
        for position in self._output.output_logprobs[first:]:
            logprob, token_id = position.token
            best = [self._named(other, value) for value, other in position.top or () if value is not None]
            entries.append(self._named(token_id, logprob) | {"top_logprobs": best[: self._body.n_probs]})
        return {"completion_probabilities": entries}

    def _named(self, token_id: int, logprob: float | None) -> Answer:
        spelled = self._context.tokenizer.token_bytes(token_id)
        value = {} if logprob is None else {"logprob": logprob}
        return {"id": token_id, "token": spelled.decode("utf-8", "replace"), "bytes": list(spelled)} | value

    def _picked(self, answer: Answer) -> Answer:
        """Return the fields that the body asks for; all of them without `response_fields`."""
        if self._body.response_fields is None:
            return answer
        picked: Answer = {}
        for path in self._body.response_fields:
            value: Any = answer
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                picked[path] = value
        return picked


def settings_of(output: Output, body: LlamaOptions, context: Context) -> Answer:
    """Return the sampling parameters as they acted, by llama.cpp's names."""
    params = output.request.params
    return {
        "n_predict": output.request.max_new_tokens,
        "n_ctx": context.capacity,
        "seed": output.request.seed,
        **{name: getattr(params, PARAMETERS[name]) for name in SHOWN_PARAMETERS},
        "stop": list(params.stop),
        "stream": body.stream,
        "n_probs": body.n_probs,
        "grammar": params.ebnf or "",
        "logit_bias": [{"bias": bias, "token": token_id} for token_id, bias in params.logit_bias.items()],
    }


def _stop(finish: FinishReason | None) -> tuple[str, str]:
    """Return the kind of the end, and the stop string that was found."""
    if finish is None or finish.type == "length" or finish.pattern:  # the pattern of n_indent
        return ("none" if finish is None else "limit"), ""
    return ("word", finish.matched) if isinstance(finish.matched, str) else ("eos", "")
