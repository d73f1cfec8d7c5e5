"""A seccomp filter that leaves a process its memory, its clock and the descriptors it has, and nothing else.

Sources: seccomp(2), and <linux/filter.h>, <linux/seccomp.h> for the layout of the program.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_DUMPABLE, PR_SET_PDEATHSIG = 38, 22, 4, 1
SECCOMP_MODE_FILTER = 2
ALLOW, KILL_PROCESS, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
LOAD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_THIRD_ARGUMENT = 0, 4, 32
PROT_EXEC = 4

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    # name: (x86_64, aarch64); None = it has none
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "munmap": (11, 215),
    "brk": (12, 214),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
"""None that changes how signals are taken: SIGXCPU, at the CPU limit, must end the process."""

MEMORY_CALLS = {"mmap": (9, 222), "mprotect": (10, 226)}
"""Allowed, unless they ask for memory that can be executed."""


def is_supported() -> bool:
    """Return whether this system can have the filter: Linux with seccomp, on a known processor."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0)  # fails: with EINVAL if the kernel has no filters
    return ctypes.get_errno() != errno.EINVAL


def program() -> bytes:
    """Returns the filter: it allows some calls, answers EPERM to all others, and ends a process of another
    architecture."""
    machine = platform.machine()
    column = list(ARCHITECTURES).index(machine)
    plain = [numbers[column] for numbers in CALLS.values() if numbers[column] is not None]
    memory = [numbers[column] for numbers in MEMORY_CALLS.values()]
    body: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, OFFSET_ARCH),
        (JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, OFFSET_NUMBER),
    ]
    for number in plain:
        body += [(JUMP_IF_EQUAL, 0, 1, number or 0), (RETURN, 0, 0, ALLOW)]
    for number in memory:
        body += [
            (JUMP_IF_EQUAL, 0, 4, number),
            (LOAD, 0, 0, OFFSET_THIRD_ARGUMENT),
            (JUMP_IF_ANY_BIT, 0, 1, PROT_EXEC),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    body.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in body)


def control(option: int, value: int) -> None:
    """Calls prctl(2) with one argument. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def lock_in() -> None:
    """Puts the filter on this process, for good. Raises OSError."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions of 8 bytes, and where they are
    header = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    wrapped = ctypes.create_string_buffer(header, len(header))
    control(PR_SET_NO_NEW_PRIVS, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(wrapped)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
