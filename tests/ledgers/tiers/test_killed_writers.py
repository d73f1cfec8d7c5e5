"""Processes that are killed while they write pages to a disk leave whole pages."""

import signal
import subprocess
import sys
from pathlib import Path

from patience import wait_until

sys.path.append(str(Path(__file__).parents[2] / "tiers"))
from numbered_pages import FILE_BYTES, _all, _files, _key, _page, _read

GUARDS = ("tiers", "storage")


WRITER = """
import itertools, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from numbered_pages import _files, _key, _page
files = _files(Path(sys.argv[1]))
print("ready", flush=True)
for number in itertools.cycle(range(40)):
    if not files.has(_key(number)):
        files.write(_key(number), _page(number))
"""


def test_whoever_is_killed_while_writing_leaves_whole_pages_and_no_lock(tmp_path):
    script = [sys.executable, "-c", WRITER, str(tmp_path), *sys.path]
    for _ in range(5):
        writer = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "ready\n"
        wait_until(lambda: len(_all(tmp_path)) > 5, "pages")
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        files = _files(tmp_path)
        files.recount()
        kept = [number for number in range(40) if files.has(_key(number))]
        assert kept
        assert [_read(files, number) for number in kept] == [_page(number) for number in kept]
        assert files.num_bytes <= 10 * FILE_BYTES
