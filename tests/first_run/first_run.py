"""A first run as a newcomer has it: empty home, empty caches, short PATH; from the installation to the first token.

    python tests/first_run/first_run.py dist/tureen-….whl [--python PYTHON]   # a wheel, without a compiler
    python tests/first_run/first_run.py --compile                              # a clean clone, `make install`

Only the package index is asked. Prints what it took and how large it is; exits with 1 where something is amiss.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "uname", "ls", "cat", "rm", "mkdir", "env", "test", "grep", "sed", "touch", "expand", "dirname", "id")
COMPILING = ("make", "git", "g++", "c++", "gcc", "cc", "as", "ld", "ar", "ranlib", "nm", "objdump")
KEPT = ("PIP_", "SSL_", "REQUESTS_CA", "HTTP", "http", "NO_PROXY", "no_proxy", "LANG")
"""Beginnings of variables that say where the package index is."""
MOST_MIB = 198
HEAVY = ("torch", "PIL", "cryptography", "transformers", "rich")
BODY = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", nargs="?", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tureen-first-run-") as folder:
        begun = time.monotonic()
        place = Path(folder)
        env = bare_environment(place, options.python, COMPILING if options.compile else ())
        bin_folder = compiled(place, env) if options.compile else installed(place, env, options.wheel.resolve())
        installed_s = time.monotonic() - begun
        faults = examine(bin_folder, env, is_compiled=options.compile)
        token_s = first_token(bin_folder, env, place)
        size = megabytes(bin_folder.parent)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"installed after {installed_s:.1f} s, first token after {installed_s + token_s:.1f} s, {size:.0f} MiB; "
        f"{used.ru_utime + used.ru_stime:.1f} s of processor time"
    )
    if size > MOST_MIB and not options.compile:
        faults.append(f"{size:.0f} MiB are more than {MOST_MIB}")
    print(*(f"FAULT: {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


def bare_environment(place: Path, python: str, more: tuple[str, ...]) -> dict[str, str]:
    """Returns an environment with an empty home and a PATH of a few programs."""
    programs = place / "bin"
    programs.mkdir()
    for name in (*TOOLS, *more):
        found = shutil.which(name, path="/usr/bin:/bin")
        if found:
            (programs / name).symlink_to(found)
    for name in ("python3", "python"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        (programs / name).chmod(0o755)
    (place / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    return kept | {"HOME": str(place / "home"), "PATH": str(programs), "TMPDIR": str(place)}


def run(command: list[str], env: dict[str, str], cwd: Path) -> str:
    ran = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def installed(place: Path, env: dict[str, str], wheel: Path) -> Path:
    """Installs the wheel as the page says, with the versions that tests run with: a release of another project must not
    decide whether a change of ours passes. Returns the folder of its programs."""
    run(["python3", "-m", "venv", "venv"], env, place)
    versions = ("--constraint", str(ROOT / "constraints.txt"))
    run([str(place / "venv/bin/pip"), "install", *versions, str(wheel)], env, place)
    return place / "venv" / "bin"


def compiled(place: Path, env: dict[str, str]) -> Path:
    """Installs a clean clone by make. Returns the folder of its programs."""
    run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", "clone"], env, place)
    print(run(["make", "install"], env, place / "clone"))
    return place / "clone" / ".venv" / "bin"


def examine(bin_folder: Path, env: dict[str, str], *, is_compiled: bool) -> list[str]:
    """Returns what is wrong with the installation."""
    tries = "\n".join(f"try:\n import {name}\n print({name!r})\nexcept ImportError: pass" for name in HEAVY)
    heavy = run([str(bin_folder / "python"), "-c", tries], env, bin_folder).split()
    report = json.loads(run([str(bin_folder / "tureen"), "check", "--json"], env, bin_folder))
    faults = [f"{name} is installed" for name in heavy]
    if report["machine"]["isa"] is None:
        faults.append(f"no native kernels: {report['machine']['fault']}")
    if not is_compiled and any(shutil.which(name, path=env["PATH"]) for name in COMPILING):
        faults.append("a compiler was within reach")
    return faults


def first_token(bin_folder: Path, env: dict[str, str], place: Path) -> float:
    """Starts a server, which fetches the default model. Returns the seconds until the first token is there."""
    begun = time.monotonic()
    log = place / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [str(bin_folder / "tureen"), "serve", "--port", "0"], env=env, cwd=place, stdout=output, stderr=output
        )
        try:
            while not (found := re.search(r"ready at (http://\S+)", log.read_text())):
                if server.poll() is not None:
                    raise SystemExit(f"the server ended:\n{log.read_text()}")
                time.sleep(0.05)
            request = urllib.request.Request(
                f"{found[1]}/generate", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                text = json.load(answer)["text"]
        finally:
            server.terminate()
            server.wait()
    print(f"first token: {text!r}")
    return time.monotonic() - begun


def megabytes(folder: Path) -> float:
    """Returns what the files of a folder take, as du counts: in blocks, each file once."""
    sizes = {}
    for path in folder.rglob("*"):
        facts = path.lstat()
        sizes[facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
