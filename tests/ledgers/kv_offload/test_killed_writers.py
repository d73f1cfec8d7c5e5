"""Processes that are killed while they write pages to a disk leave whole pages."""

import signal
import subprocess
import sys
from pathlib import Path

from timeouts import wait_until

sys.path.append(str(Path(__file__).parents[2] / "kv_offload"))
from numbered_pages import FILE_BYTES, files_in, key_of, page_files_in, page_of, read_page

GUARDS = ("kv_offload", "storage")


WRITER = """
import itertools, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from numbered_pages import page_files_in, key_of, page_of
files = page_files_in(Path(sys.argv[1]))
print("ready", flush=True)
for number in itertools.cycle(range(40)):
    if not files.has(key_of(number)):
        files.write(key_of(number), page_of(number))
"""


def test_whoever_is_killed_while_writing_leaves_whole_pages_and_no_lock(tmp_path):
    script = [sys.executable, "-c", WRITER, str(tmp_path), *sys.path]
    for _ in range(5):
        writer = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "ready\n"
        wait_until(lambda: len(files_in(tmp_path)) > 5, "pages")
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        files = page_files_in(tmp_path)
        files.recount()
        kept = [number for number in range(40) if files.has(key_of(number))]
        assert kept
        assert [read_page(files, number) for number in kept] == [page_of(number) for number in kept]
        assert files.num_bytes <= 10 * FILE_BYTES
