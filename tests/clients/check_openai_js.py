"""OpenAI's official JavaScript client, run by Node: openai_client.mjs says what is asked and what must come back."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODULES = Path(os.environ.get("TUREEN_NODE_MODULES", HERE.parents[1] / "build" / "clients" / "node_modules"))


def test_the_script_finds_everything_right(url, tmp_path):
    (tmp_path / "node_modules").symlink_to(MODULES)
    script = tmp_path / "openai_client.mjs"
    script.write_text((HERE / "openai_client.mjs").read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(["node", str(script), f"{url}/v1"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
