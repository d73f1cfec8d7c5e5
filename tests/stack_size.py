"""Asks the system for the size of a thread's stack."""

from __future__ import annotations

import ctypes

ATTRIBUTES_BYTES = 256
"""More than a pthread_attr_t takes on any platform."""


def stack_bytes() -> int:
    """Return the bytes of stack of the thread that calls this (pthread_getattr_np(3))."""
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(ATTRIBUTES_BYTES), ctypes.c_size_t()
    libc.pthread_self.restype = ctypes.c_void_p
    assert libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    libc.pthread_attr_destroy(attributes)
    return size.value
