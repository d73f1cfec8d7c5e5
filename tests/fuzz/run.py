"""Fuzz each target for a minute, guided by coverage: `run.py [TARGET [SECONDS]]`. Crashes are kept in the corpus."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]  # atheris instruments what is found by a path only

SECONDS = 60


def fuzz_one(name: str, seconds: int) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    # of an editable installation: what it loads would run, but not be watched
    sys.meta_path[:] = [one for one in sys.meta_path if not hasattr(one, "known_source_files")]
    with atheris.instrument_imports(include=["tureen"]):
        import fuzz_targets
    folder = fuzz_targets.CORPUS / name
    options = [f"-max_total_time={seconds}", "-rss_limit_mb=4096", "-timeout=20", f"-artifact_prefix={folder}/crash-"]
    words = HERE / "dictionaries" / f"{name}.dict"
    options += [f"-dict={words}"] * words.exists()
    new = Path("build/fuzz", name)  # what it makes up stays out of the tree
    new.mkdir(parents=True, exist_ok=True)

    def run(data: bytes) -> None:
        try:
            fuzz_targets.run(name, data)
        except BaseException:  # atheris does not keep it on every machine
            (folder / f"crash-{hashlib.sha1(data).hexdigest()}").write_bytes(data)
            raise

    atheris.Setup([sys.argv[0], *options, str(new), str(folder)], run)
    atheris.Fuzz()


def main(args: list[str]) -> int:
    if args and args[0] == "--in-here":
        fuzz_one(args[1], int(args[2]))
        return 0
    import fuzz_targets

    names = args[:1] or list(fuzz_targets.TARGETS)
    seconds = args[1] if len(args) > 1 else str(SECONDS)
    crashed = [
        name for name in names if subprocess.run([sys.executable, __file__, "--in-here", name, seconds]).returncode
    ]
    print(f"{len(names) - len(crashed)} of {len(names)} targets found nothing" + (f"; {crashed}" if crashed else ""))
    return int(bool(crashed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
