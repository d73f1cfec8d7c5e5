"""What SGLang's own classes send of themselves, in a process where its names are importable."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tureen.config import Config
from tureen.fields.processor import check_processor
from tureen.logit_processor import SGLANG_NAMES

FIELD, OFF = "custom_logit_processor", Config()
COMPAT = Path(__file__).resolve().parents[3] / "compat" / "sglang"
GUARDS = ("sampling", "compat/*")


def _run(script: str, *arguments: str) -> str:
    """What a script prints where SGLang's names are importable."""
    environment = os.environ | {"PYTHONPATH": str(COMPAT)}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd="/").stdout


SENT = """
import json, sys
import dill
from sglang.srt.sampling import custom_logit_processor as module

sent = {}
for name in sys.argv[1:]:
    kind = getattr(module, name)
    sent[name] = [kind.to_str(), kind().to_str()]
    for protocol in (2, 3, 4, 5):
        for thing in (kind, kind()):
            sent[name].append(json.dumps({"callable": dill.dumps(thing, protocol=protocol).hex()}))
print(json.dumps(sent))
"""


def test_what_sglang_s_processors_send_of_themselves_is_their_name_and_needs_no_permission():
    sent = json.loads(_run(SENT, *SGLANG_NAMES))
    for name, payloads in sent.items():
        assert len(payloads) == 10
        assert {check_processor(payload, OFF, FIELD) for payload in payloads} == {name}
        assert check_processor(name, OFF, FIELD) == name
