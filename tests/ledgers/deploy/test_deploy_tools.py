"""Images and the service are without faults by their own linters."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployed import DEPLOY, IMAGES, service_command

GUARDS = ("deploy/*/*",)

HADOLINT = Path(sys.executable).with_name("hadolint")
SYSTEMD = shutil.which("systemd-analyze")


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_has_no_fault_that_the_linter_knows(image):
    done = subprocess.run([HADOLINT, image], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.skipif(SYSTEMD is None, reason="there is no systemd-analyze on this machine")
def test_the_service_is_one_that_systemd_understands(tmp_path):
    unit = (DEPLOY / "systemd" / "tureen.service").read_text().replace(service_command()[0], shutil.which("true"))
    (tmp_path / "tureen.service").write_text(unit)
    done = subprocess.run([SYSTEMD, "verify", tmp_path / "tureen.service"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
