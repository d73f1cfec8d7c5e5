"""What only a process of its own shows of a command: what it imports, how Python ends it, what a shell completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from tureen.__main__ import CLOSED_PIPE
from tureen.config import Config

BIN = Path(sys.executable).parent


def test_commands_import_only_what_they_need():
    only_the_file_asked_for_is_imported()
    help_shows_every_setting_and_loads_no_torch()


def only_the_file_asked_for_is_imported():
    code = (
        "import sys; from tureen.registry import declared, find_model; declared('tureen.models', 'ARCHITECTURES');"
        "assert 'torch' not in sys.modules; find_model('Qwen3ForCausalLM');"
        "print([name for name in sys.modules if name.startswith('tureen.models.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "qwen3" in run.stdout
    assert "llama" not in run.stdout


def help_shows_every_setting_and_loads_no_torch():
    code = (
        "import sys\nfrom tureen.cli import command_line as cli\n"
        "try: cli.main(['serve', '--help=all'])\nexcept SystemExit as e: assert e.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "[30000]" in shown
    for field in msgspec.structs.fields(Config):
        assert "--" + field.name.replace("_", "-") in shown


def test_python_m_tureen_and_launch_server_are_the_commands_and_a_closed_pipe_is_no_fault():
    python_m_tureen_is_the_command_and_launch_server_takes_the_flags_of_serve()
    the_program_itself_writes_nothing_of_a_closed_pipe()


def python_m_tureen_is_the_command_and_launch_server_takes_the_flags_of_serve():
    done = subprocess.run([sys.executable, "-m", "tureen", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:7]) == (0, "tureen ")
    command = [sys.executable, "-m", "tureen.launch_server", "--prot", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--port" in done.stderr


def the_program_itself_writes_nothing_of_a_closed_pipe():
    """Flush at Python's own exit."""
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "tureen", "config", "show"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (CLOSED_PIPE, b"")


LINES = {
    "tureen se": ["serve"],
    "tureen serve --max-qu": ["--max-queued-requests"],
    "tureen serve --engine ": ["auto", "process", "thread"],
    "tureen serve --port 1 --grammar-backend x": ["xgrammar"],
    "tureen config show --page": ["--page-size"],
    "tureen completion ": ["bash", "fish", "zsh"],
    "tureen generate --temperat": ["--temperature"],
}


def completed(line: str) -> list[str]:
    """What bash offers behind the line, with tureen's own completion."""
    code = """
        eval "$(tureen completion bash)"
        COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
        _python_argcomplete tureen
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{BIN}:{os.environ['PATH']}"
    command = [shutil.which("bash") or "bash", "-c", code, "bash", line]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path})
    return [word.strip() for word in ran.stdout.splitlines() if word.strip()]


def test_bash_completes_commands_flags_and_their_words():
    found = {line: sorted(word for word in completed(line) if word not in ("-h", "--help")) for line in LINES}
    assert found == LINES
