"""Logit processors that clients send, their pool without processes, and steps of a sampler that has them."""

from __future__ import annotations

import itertools
import mmap

import inline_workers
import msgspec
import numpy as np
import torch
from arithmetics import arithmetic, make_array, make_rows, make_sampler
from sampling_reference import make_logits, make_state

from tureen.logit_processor import CustomLogitProcessor
from tureen.sampling import processor_messages as messages
from tureen.sampling import tensor_logits
from tureen.sampling.processor_worker import LoadedProcessor
from tureen.sandbox.fork_server import Program

VOCAB = 120
PATIENCE_S = 120

HANG = "raise TimeoutError('hangs')"
END = "raise SystemError('ends its process')"
"""What code says that hangs, or ends its process, as far as the pool can tell."""

another = itertools.count()
"""A number for each payload: none is refused for what an earlier one did."""


def program(setup):
    """The program of processor_worker.py, which changes nothing of this process."""
    shape = msgspec.msgpack.decode(setup, type=messages.LogitsShape)

    def open_(descriptors):
        shared = mmap.mmap(descriptors[0], shape.rows * shape.width * 4)
        values = np.frombuffer(shared, dtype=np.float32).reshape(shape.rows, shape.width)
        loaded = LoadedProcessor(tensor_logits.from_array(values), tensor_logits)

        def handle(data):
            reply = loaded.handle(data)
            if b"SystemError" in reply:
                raise inline_workers.ended_by_itself()
            return None if b"TimeoutError" in reply else reply

        return handle

    return Program(messages.LIMITS, open_)


def use_inline_workers(monkeypatch):
    inline_workers.use(monkeypatch, "tureen.sampling.processor_pool", program)


def sent(body: str, method="__call__", arguments="logits, custom_param_list") -> str:
    """The payload of a client's script whose class does this when it is called."""
    scope = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor, "torch": torch, "np": np}
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    exec(f"class Mine(CustomLogitProcessor):\n    def {method}(self, {arguments}):\n{lines}\n", scope)
    return scope["Mine"].to_str()


def hanging(method="__call__"):
    """Another payload each time, whose class hangs in this method."""
    return sent(f"marker = {next(another)}\n{HANG}", method, "*given")


def state(slot, processor="", *, client="", seed=3, logprobs=None, params=None, **sampling):
    made = make_state(slot, seed=seed + slot, logprobs=logprobs, custom_params=params, **sampling)
    return msgspec.structs.replace(made, processor=processor, client=client)


def load(processors, states):
    """What the engine does before a request runs. Returns the leases."""
    leases = [processors.pool.acquire(one.client, one.processor) for one in states if one.processor.startswith("{")]
    assert all(lease.is_settled.wait(PATIENCE_S) for lease in leases)
    return leases


def steps(processors, states, count=3, *, vocab=VOCAB):
    """The outputs of each step for all rows; a row that failed stays in the batch."""
    leases = load(processors, states)
    try:
        return run_steps(processors, states, count, vocab)
    finally:
        for lease in leases:
            processors.pool.release(lease)


def run_steps(processors, states, count, vocab=VOCAB):
    sampler = make_sampler(len(states), vocab, processors)
    for one in states:
        sampler.set_slot(one)
    logits = make_logits(5, vocab, rows=count * len(states)).reshape(count, len(states), vocab)
    slots = [one.slot for one in states]
    starts = [len(one.prompt_ids) + len(one.output_ids) for one in states]
    return [sampler.sample(make_rows(logits[step]), slots, [start + step for start in starts]) for step in range(count)]


def applied(processors, logits, states):
    """The rows that failed; checks that the peaks are those of the logits."""
    peaks = arithmetic().peaks(logits)
    failures = processors.apply(arithmetic(), logits, peaks, states)
    assert peaks.values.tolist() == make_array(logits).max(axis=1).tolist()
    assert peaks.token_ids.tolist() == make_array(logits).argmax(axis=1).tolist()
    return failures
