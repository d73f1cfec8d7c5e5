"""Whether a kernel takes seccomp filters."""

from __future__ import annotations

import errno

import pytest

from tureen.sandbox import seccomp


@pytest.mark.parametrize(("number", "is_supported"), [(errno.EFAULT, True), (errno.EPERM, True), (errno.EINVAL, False)])
def test_a_kernel_without_filters_is_told_from_one_that_refuses_the_question(monkeypatch, number, is_supported):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("ctypes.get_errno", lambda: number)
    assert seccomp.is_supported() is is_supported
