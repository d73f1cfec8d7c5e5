"""Simulate the whole server: `run.py SEED` shows one seed, `run.py FIRST COUNT` runs many and names those that fail."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from simulation import Simulation  # noqa: E402 - the path comes first


def show(seed: int) -> int:
    one = Simulation(seed)
    print(one.faults)
    print(
        {name: getattr(one.config, name) for name in ("max_queued_requests", "chunked_prefill_size", "schedule_policy")}
    )
    try:
        one.run()
    except BaseException:  # noqa: BLE001 - it is shown
        print("\n".join(one.loop.trace))
        traceback.print_exc()
        return 1
    print("\n".join(one.loop.trace))
    print(f"seed {seed}: all as it must be; {one.tally.__dict__}")
    return 0


def main(args: list[str]) -> int:
    if len(args) == 1:
        return show(int(args[0]))
    first, count = map(int, args)
    logging.disable()
    failed = []
    for seed in range(first, first + count):
        try:
            Simulation(seed).run()
        except KeyboardInterrupt:
            break
        except BaseException as error:  # noqa: BLE001 - it is named
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{count - len(failed)} of {count} seeds went well" + (f"; failed: {failed}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # so that one seed is one history
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.exit(main(sys.argv[1:]))
