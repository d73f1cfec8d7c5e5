"""The second distribution, compat/sglang: commands of SGLang's documentation run word for word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tureen.logit_processor import SGLANG_MODULE

SOURCE = Path(__file__).resolve().parents[2] / "compat" / "sglang"


def _build(folder: Path, *, path: str = "") -> subprocess.CompletedProcess[str]:
    """Builds the wheel into the folder, as pip does. `path`: a folder of packages that are installed too."""
    (folder / "wheel").mkdir()

    code = (
        "import os, sys; sys.path.insert(0, '.'); import guarded_build;"
        f"guarded_build.build_wheel({str(folder / 'wheel')!r}, {{'--global-option': ['--quiet']}})"
    )
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    copied = folder / "copy"
    subprocess.run(["cp", "-r", str(SOURCE), str(copied)], check=True)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=copied, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Builds and unpacks the distribution; returns its folder."""
    folder = tmp_path_factory.mktemp("sglang")
    built = _build(folder)
    assert built.returncode == 0, built.stderr
    [wheel] = (folder / "wheel").glob("tureen_sglang-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    return folder / "installed"


def _run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_the_documented_command_and_the_documented_name_of_processors_are_tureen_s(installed):
    the_documented_command_is_tureen_serve(installed)
    a_processor_that_is_derived_by_the_documented_name_has_the_form_that_the_server_takes(installed)


def the_documented_command_is_tureen_serve(installed):
    shown = _run(installed, "-m", "sglang.launch_server", "--help")
    assert (shown.returncode, "--model-path" in shown.stdout) == (0, True)
    wrong = _run(installed, "-m", "sglang.launch_server", "--no-such-flag")
    assert wrong.returncode == 2
    assert "--no-such-flag" in wrong.stderr


def a_processor_that_is_derived_by_the_documented_name_has_the_form_that_the_server_takes(installed):
    code = (
        "from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor\n"
        "class Mine(CustomLogitProcessor):\n"
        "    def __call__(self, logits, custom_param_list): return logits\n"
        "print(Mine().to_str())"
    )
    printed = _run(installed, "-c", code)
    assert printed.returncode == 0, printed.stderr
    payload = bytes.fromhex(json.loads(printed.stdout)["callable"])
    assert SGLANG_MODULE.encode() in payload


def test_it_refuses_to_lie_over_sglang_itself(tmp_path):
    real = tmp_path / "packages" / "sglang-0.5.3.dist-info"
    real.mkdir(parents=True)
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.3\n")
    built = _build(tmp_path, path=str(real.parent))
    assert built.returncode != 0
    assert "SGLang is installed here" in built.stderr
    assert list((tmp_path / "wheel").iterdir()) == []
