"""The deltas of a request, one by one: where an output is cut, another engine goes on with it."""


def pieces(engine, request, *mates):
    """Return the deltas of a request that runs beside others."""
    for one in (*mates, request):
        engine.add(one)
    found = []
    while engine.has_work or engine.is_preparing:
        engine.prepare()
        found += [delta for delta in engine.step() if delta.id == request.id]
    return found
