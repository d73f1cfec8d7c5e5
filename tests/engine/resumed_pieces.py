"""Collect the deltas of a request, and resume it from one of them on another engine."""


def pieces(engine, request, *mates):
    """Return the deltas of one request while others run concurrently."""
    for one in (*mates, request):
        engine.add(one)
    found = []
    while engine.has_work or engine.is_preparing:
        engine.prepare()
        found += [delta for delta in engine.step() if delta.id == request.id]
    return found
