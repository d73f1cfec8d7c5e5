"""`python -I -m tureen.requests.template_worker`: a fork server whose workers render chat templates."""

from __future__ import annotations

import marshal
from collections.abc import Sequence

from tureen.sandbox import fork_server
from tureen.sandbox.fork_server import Handle, Program
from tureen.sandbox.limits import WorkerLimits
from tureen.text.template_jobs import Variables, do_job, write_job
from tureen.text.template_sandbox import Sandbox

LIMITS = WorkerLimits(memory_bytes=1 << 30, cpu_s=2, is_sealed=True)
"""The CPU time is for a single operation: between operations a template looks itself whether its time is over."""
FIRST = "{{ strftime_now('%Y') }}{{ [1] | tojson }}{{ raise_exception('') }}"
"""Makes jinja2 import what it imports late: a sealed worker can open no files."""


def program(_: bytes) -> Program:
    """Returns the program of a worker that does one job a message."""
    do_job(write_job(marshal.dumps(Sandbox().code_of(FIRST, lambda tree: tree)), Variables({})))
    return Program(LIMITS, _open)


def _open(_: Sequence[int]) -> Handle:
    return do_job


if __name__ == "__main__":
    fork_server.main(program)
