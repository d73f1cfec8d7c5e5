"""What a request must answer when it runs alone: the fake model written again, from the tokens alone."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from byte_tokenizer import EOS, VOCAB_SIZE

SAY = b"say:"
LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz")


class Solo(NamedTuple):
    """`raw` is all that was written, `text` what a client sees of it at the end."""

    token_ids: list[int]
    raw: str
    text: str
    finish: str


class Shape(NamedTuple):
    """A regular expression of fixed length: the bytes that may stand at each place."""

    regex: str
    places: tuple[bytes, ...]


SHAPES = (
    Shape("[a-f]{3}", (b"abcdef",) * 3),
    Shape("x[yz]end", (b"x", b"yz", b"e", b"n", b"d")),
    Shape("[0-9]{2}-[a-c]{4}", (b"0123456789",) * 2 + (b"-",) + (b"abc",) * 4),
    Shape("fixed", (b"f", b"i", b"x", b"e", b"d")),
)


def _hash(*parts: bytes | int) -> bytes:
    data = b"".join(p if isinstance(p, bytes) else p.to_bytes(8, "little", signed=True) for p in parts)
    return blake2b(data, digest_size=8).digest()


def _next(prompt: bytes, token: int, output: list[int], allowed: frozenset[int] | None) -> int:
    """The model's wish, then the first behind it that is allowed."""
    if prompt.startswith(SAY):
        script = prompt[len(SAY) :]
        token = script[len(output)] if len(output) < len(script) else EOS
    else:
        token = ord("a") + token % 26
    while allowed is not None and token not in allowed:
        token = (token + 1) % VOCAB_SIZE
    return token


def _cut(raw: str, stops: tuple[str, ...]) -> int | None:
    """Where the first stop string begins that is complete first."""
    ends = [(raw.find(stop) + len(stop), raw.find(stop)) for stop in stops if stop in raw]
    return min(ends)[1] if ends else None


def solo(
    prompt_ids: list[int],
    *,
    seed: int,
    is_greedy: bool,
    max_new_tokens: int,
    stops: tuple[str, ...] = (),
    shape: Shape | None = None,
) -> Solo:
    stored: list[bytes] = []
    for token in prompt_ids:
        stored.append(_hash(stored[-1] if stored else b"", token))
    prompt = bytes(one for one in prompt_ids if one < 256)
    output: list[int] = []
    while len(output) < max_new_tokens:
        number = int.from_bytes(_hash(_hash(*stored), 0 if is_greedy else seed, *output[-4:], len(output)), "little")
        allowed = None if shape is None else frozenset(shape.places[len(output)])
        token = _next(prompt, number % VOCAB_SIZE, output, allowed)
        output.append(token)
        stored.append(_hash(stored[-1], token))
        raw = bytes(one for one in output if one < 256).decode()
        cut = _cut(raw, stops)
        if cut is not None:
            return Solo(output, raw, raw[:cut], "stop")
        if token == EOS or (shape is not None and len(output) == len(shape.places)):
            return Solo(output, raw, raw, "stop")
    raw = bytes(output).decode()
    return Solo(output, raw, raw, "length")
