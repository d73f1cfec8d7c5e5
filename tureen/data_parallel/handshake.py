"""The first words between a front and an engine on another machine: what each of them is, so that none takes the other
for something else."""

from __future__ import annotations

import hashlib
from functools import cache

import msgspec

from tureen import __version__
from tureen.build import Model
from tureen.contract.types import EngineRole, FromEngine
from tureen.serving.pixels import ToChild
from tureen.weights.source import weights_digest

PROTOCOL = 2
"""Counts changes of this file that the other messages do not show."""

RESTART = "restart_engine"
"""The control operation that is the engine's host's: a new engine, without what operators did to the old one."""

MAX_GREETING_BYTES = 1 << 12


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The front's first message."""

    contract: str
    version: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to a front that may stay."""

    engine_id: str  # equal as long as the engine keeps what operators did to it
    weights: str
    tokenizer: str
    role: EngineRole


class GreetingRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The answer to a front that may not stay: one line for its operator."""

    message: str


@cache
def contract_digest() -> str:
    """Returns a digest of all that a front and an engine may say to each other, and in which form."""
    schemas = [msgspec.json.encode(msgspec.json.schema(kind), order="deterministic") for kind in (ToChild, FromEngine)]
    return hashlib.sha256(b"\0".join([b"%d" % PROTOCOL, *schemas])).hexdigest()[:16]


def hello() -> Hello:
    """Returns this front's first message."""
    return Hello(contract_digest(), __version__)


class ModelDigests(msgspec.Struct, frozen=True):
    """A model, as the engines that are to continue each other's outputs must have it."""

    weights: str
    tokenizer: str


def digests_of(model: Model) -> ModelDigests:
    """Returns a model's digests."""
    tokenizer = hashlib.sha256(model.tokenizer.backend.to_str().encode())
    return ModelDigests(weights_digest(model.source), tokenizer.hexdigest()[:16])
