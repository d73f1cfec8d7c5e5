"""The schedule of one fixed workload. A refactoring must not change it.

After an intended change of policy `python tests/engine/test_golden_schedule.py` writes it anew; read the difference.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from world import World, make_request

from tureen.contract.types import LogprobSpec

GOLDEN = Path(__file__).parent.parent / "golden" / "schedule.txt"


def _trace() -> str:
    """One line a step: request slot:start+tokens, a star where a token is drawn; then free and evictable pages."""
    world = World(num_pages=16, page_size=4, max_rows=4, token_budget=10)
    stem = list(range(20, 32))
    arrivals = {
        0: [("a", stem), ("b", [*stem, 1]), ("c", [*stem, 2, 3])],
        3: [("d", [5, 6, 7]), ("e", stem[:9])],
        9: [("f", [8] * 25), ("g", [*stem, 9])],
    }
    lines = []
    while arrivals or world.engine.has_work:
        for name, prompt in arrivals.pop(world.num_steps, ()):
            spec = LogprobSpec(prompt_start=2) if name == "c" else None
            world.add(make_request(name, prompt, max_new_tokens=16, ignore_eos=True, logprobs=spec))
        if world.num_steps == 12:
            world.engine.abort("d")
        names = {s.slot: s.request.id for s in world.engine.scheduler.running}
        deltas = world.step()
        names |= {s.slot: s.request.id for s in world.engine.scheduler.running}
        stats = world.engine.stats()
        rows = [
            f"{names[row.slot]} {row.slot}:{row.start}+{len(row.token_ids)}{'*' * row.sample}"
            for row in world.runner.last.rows
        ]
        ends = "".join(f" {delta.id}={delta.finish.type}" for delta in deltas if delta.finish)
        pages = f"{stats.num_free_pages}+{stats.num_cached_pages}"
        lines.append(f"{world.num_steps:3} | {', '.join(rows)} | {pages} | preempted {stats.total_preemptions}{ends}")
    world.check_answers()
    return "\n".join(lines) + "\n"


def test_the_schedule_of_the_fixed_workload_is_unchanged():
    assert _trace() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(_trace())
