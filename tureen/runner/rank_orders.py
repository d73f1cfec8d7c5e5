"""The messages between rank 0 and the processes of the other ranks. No torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tureen.config import Config
from tureen.contract.runner import Batch, Capacity


class RankOrder(msgspec.Struct, frozen=True):
    """The first message to a rank: what it is to load, and where it meets the others. It answers with RankReply."""

    rank: int
    config: Config
    name: str  # of the model
    path: str
    format: Literal["gguf", "safetensors"]
    mmproj: str | None  # see ModelSource
    device: str  # cpu or cuda
    num_threads: int
    capacity: Capacity
    store_path: str


class RankStep(msgspec.Struct, frozen=True, tag="step"):
    """A step to compute. It is not answered: what comes of it goes to rank 0 by torch."""

    batch: Batch


class RankCall(msgspec.Struct, frozen=True, tag="call"):
    """A control operation of the runner, such as load_adapter. It is answered with RankReply."""

    op: str
    args: dict[str, Any]


class RankReply(msgspec.Struct, frozen=True):
    """The answer of a rank. `error`: what went wrong; "" = nothing."""

    error: str = ""


ToRank = RankStep | RankCall
