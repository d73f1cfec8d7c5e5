"""Requests of every kind, which go on in another engine when theirs is lost."""

from __future__ import annotations

import msgspec
from fake_engine import make_request

from tureen.contract.params import SamplingParams
from tureen.contract.types import LogprobSpec, MediaItem
from tureen.grammar.base import GrammarSpec

PICTURE = MediaItem("1" * 64, 0, 2, bytes(12), (1, 2, 2, 3))


def request(request_id, text="abc", *, seed=1, tokens=14, **fields):
    """A request of the fake engine; fields of the sampling parameters go where they belong."""
    params = SamplingParams(
        max_new_tokens=tokens, **{name: fields.pop(name) for name in list(fields) if hasattr(SamplingParams, name)}
    )
    plain = make_request(request_id, text, max_new_tokens=tokens, **fields)
    return msgspec.structs.replace(plain, params=params, seed=seed)


def requests():
    """One of each kind."""
    return [
        request("plain"),
        request("greedy", temperature=0),
        request("seeded", seed=77, temperature=0.8),
        request("sample-2", seed=78, temperature=0.8),
        request("said", "say:héllo wörld"),
        request("stop", "say:one STOP two", stop=("STOP",)),
        request("held", "say:one STO and no more", tokens=30, stop=("STOP",)),
        request("json", grammar=GrammarSpec("json_schema", '{"enum": ["abcdefgh", "abcxyz"]}')),
        request("regex", seed=5, grammar=GrammarSpec("regex", "[a-f]{9}")),
        request("scored", logprobs=LogprobSpec(prompt_start=0, top=2)),
        request("scored-json", grammar=GrammarSpec("choice", '["abcdefgh", "abcxyz"]'), logprobs=LogprobSpec()),
        request("explained", seed=9, explain=True),
        request("explained-json", grammar=GrammarSpec("choice", '["abcdefgh", "abcxyz"]'), explain=True),
        request("last-state", hidden_states="last"),
        request("all-states", hidden_states="all"),
        request("pooled", tokens=0, hidden_states="pooled"),
        request("salted", cache_salt="mine"),
        request("picture", media=(PICTURE,), tokens=6),
    ]
