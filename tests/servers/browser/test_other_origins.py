"""A browser shows a page of another origin the server's answer only if the server allows that origin."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading

import pytest
from app_under_test import LiveServer

CHAT = "https://chat.example.org"
BODY = {"text": "Hi", "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

PAGE = """<title>asking</title><script type="module">
const body = %s, headers = {"Content-Type": "application/json"};
try {
  const answer = await fetch("%s/generate", {method: "POST", headers, body: JSON.stringify(body)});
  document.title = `${answer.status} ${answer.headers.get("x-request-id") !== null} ${(await answer.json()).text}`;
} catch (error) { document.title = `blocked ${error.name}`; }
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_the_answer_to_an_allowed_page_only(tmp_path):
    titles = {is_allowed: title_of_a_page(tmp_path, is_allowed) for is_allowed in (True, False)}
    assert titles[True].startswith("200 true ")
    assert titles[False].startswith("blocked TypeError")


def title_of_a_page(tmp_path, is_allowed: bool) -> str:
    """Return what a page of another origin shows of the server's answer."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever).start()
        origin = f"http://127.0.0.1:{site.server_port}"
        with LiveServer(allowed_origins=(origin if is_allowed else CHAT,)) as server:
            (tmp_path / "page.html").write_text(PAGE % (json.dumps(BODY), server.url))
            command = [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={tmp_path / f'profile-{is_allowed}'}",
            ]
            command += ["--virtual-time-budget=60000", "--dump-dom", f"{origin}/page.html"]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        site.shutdown()
    return re.search("<title>(.*)</title>", shown)[1]
