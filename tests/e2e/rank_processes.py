"""A real server whose model is computed by several ranks, and the processes of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from followers import PATIENCE_S
from server_process import ServerProcess, command_line
from tiny_adapters import write_adapter
from tiny_models import write


@contextmanager
def serving(folder: Path, *settings: str) -> Iterator[ServerProcess]:
    """A server of a model with three layers, which has an adapter with the name `late`."""
    model = write(folder, "llama", num_hidden_layers=3, vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=EOS)
    make_byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    write_adapter(model, folder / "adapter")
    limits = ("--grammar-compile-timeout-s", "120", "--context-length", "512", "--dtype", "float32")
    with ServerProcess("--model-path", str(folder), *settings, *limits, "--num-threads", "1") as running:
        running.wait_ready()
        body = {"lora_name": "late", "lora_path": str(folder / "adapter")}
        assert httpx.post(f"{running.url}/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200
        yield running


def ranks(server: ServerProcess) -> list[int]:
    """The processes of all ranks but the first: children of the server, or of its engine's process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and "tureen.runner.rank_child" in command_line(int(entry.name)):
            parents = _ancestors(int(entry.name))
            found += [int(entry.name)] if server.process.pid in parents else []
    return found


def _ancestors(pid: int) -> list[int]:
    parents = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        parents.append(pid)
    return parents
