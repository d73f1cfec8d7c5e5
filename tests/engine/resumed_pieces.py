"""Collect the deltas of a request, and resume it from one of them on another engine."""

import msgspec


def pieces(engine, request, *mates):
    """Return the deltas of one request while others run concurrently.

    They do not say how many tokens the engine guessed: that depends on how long its steps took.
    """
    for one in (*mates, request):
        engine.add(one)
    found = []
    while engine.has_work or engine.is_preparing:
        engine.prepare()
        found += [without_guesses(delta) for delta in engine.step() if delta.id == request.id]
    return found


def without_guesses(delta):
    if delta.usage is None:
        return delta
    usage = msgspec.structs.replace(delta.usage, guessed_tokens=0, right_guesses=0)
    return msgspec.structs.replace(delta, usage=usage)
