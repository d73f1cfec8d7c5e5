"""The example in the library's README prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tureen.grammar

GUARDS = ("grammar",)

README = Path(tureen.grammar.__file__).with_name("README.md")


def test_the_readmes_example_prints_what_its_comments_say():
    code = re.search(r"```python\n(.+?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    expected = re.findall(r"^ *print\(.+\)  # (.+)$", code, re.MULTILINE)
    assert len(expected) == code.count("print(")
    ran = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert ran.stdout.splitlines() == expected


def test_the_library_loads_nothing_of_the_server():
    code = (
        "import sys; from tureen.grammar import LanguageCompiler, compile_grammar\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('tureen.')})"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert set(ran.stdout.split()) == {"grammar", "errors"}
