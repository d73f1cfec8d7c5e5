"""`/v1/files`: an upload goes to the disk as it comes, and nobody but its client sees it."""

from __future__ import annotations

import asyncio
import os
import stat

import pytest
from app_under_test import App
from batch_app import ROUTE, BatchApp, line

from tureen.batches import records, upload
from tureen.http.multipart import FormReader

BOUNDARY = "a-boundary"


@pytest.fixture
def app(tmp_path):
    with BatchApp(tmp_path / "kept") as running:
        yield running


def part(name: str, content: bytes, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


PURPOSE, END = part("purpose", b"batch"), f"--{BOUNDARY}--\r\n".encode()
FILE = part("file", b"abc", '; filename="in.jsonl"')


def post(app: App, content: bytes, content_type: str = f"multipart/form-data; boundary={BOUNDARY}"):
    return app.request("POST", "/v1/files", content=content, headers={"content-type": content_type})


def on_disk(tmp_path) -> list[str]:
    return [path.name for path in (tmp_path / "kept" / "files").iterdir()]


def test_a_file_comes_back_as_it_was_sent(app):
    content = bytes(range(256)) * 1000
    file = app.upload(content, "requests.jsonl")
    assert {name: file[name] for name in ("object", "bytes", "filename", "purpose", "status", "expires_at")} == {
        "object": "file",
        "bytes": 256_000,
        "filename": "requests.jsonl",
        "purpose": "batch",
        "status": "processed",
        "expires_at": None,
    }
    assert app.get(f"/v1/files/{file['id']}") == file
    response = app.request("GET", f"/v1/files/{file['id']}/content")
    assert response.content == content
    assert response.headers["content-length"] == "256000"


@pytest.mark.parametrize("form", [FILE + PURPOSE, PURPOSE + FILE])
def test_fields_may_stand_before_and_behind_the_file(app, form):
    response = post(app, form + END)
    assert response.status_code == 200, response.text
    assert app.request("GET", f"/v1/files/{response.json()['id']}/content").content == b"abc"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_form_means_the_same_however_it_is_cut(size):
    form = FILE + part("note", "grün".encode()) + PURPOSE + END
    reader, content = FormReader(BOUNDARY.encode(), "file"), b""
    for at in range(0, len(form), size):
        reader.feed(form[at : at + size])
        content += bytes(reader.piece)
        reader.piece.clear()
    assert (content, reader.finish()) == (b"abc", ({"note": "grün", "purpose": "batch"}, "in.jsonl"))


def test_the_file_is_on_the_disk_before_the_form_has_ended(app, tmp_path):
    sizes = []

    async def pieces():
        yield PURPOSE + FILE.removesuffix(b"\r\n")
        for _ in range(5):
            yield b"x" * 100_000
            [path] = (tmp_path / "kept" / "files").iterdir()
            sizes.append(path.stat().st_size)
        yield b"\r\n" + END

    response = post(app, pieces())
    assert response.json()["bytes"] == 500_003
    assert sizes[-1] >= 400_000


# ---- what is refused

REFUSED = {
    "no file": (PURPOSE + END, "file"),
    "two files": (FILE + FILE + PURPOSE + END, "file"),
    "no purpose": (FILE + END, "purpose"),
    "another purpose": (FILE + part("purpose", b"fine-tune") + END, "purpose"),
    "two purposes": (FILE + PURPOSE + PURPOSE + END, "purpose"),
    "no end": (PURPOSE + FILE, None),
    "no form": (b"abc", None),
    "nothing": (b"", None),
    "a field that is long": (part("purpose", b"x" * 5000) + FILE + END, "purpose"),
    "many fields": (b"".join(part(f"f{index}", b"") for index in range(40)) + FILE + PURPOSE + END, None),
    "many headers": (
        b"--" + BOUNDARY.encode() + b"\r\n" + b"a: b\r\n" * 1000 + b"\r\n\r\n" + FILE + PURPOSE + END,
        None,
    ),
    "a name of two lines": (part("file", b"", '; filename="a%0Ab\x01"') + PURPOSE + END, "file"),
    "a long name": (part("file", b"", f'; filename="{"a" * 256}"') + PURPOSE + END, "file"),
    "a slip": (FILE + PURPOSE + part("purpos", b"x") + END, "purpos"),
    "an expiry that is short": (FILE + PURPOSE + part("expires_after[seconds]", b"5") + END, "expires_after[seconds]"),
    "an expiry that is none": (FILE + PURPOSE + part("expires_after[seconds]", b"x") + END, "expires_after[seconds]"),
    "an expiry from never": (FILE + PURPOSE + part("expires_after[anchor]", b"x") + END, "expires_after[anchor]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(app, tmp_path, name):
    content, param = REFUSED[name]
    response = post(app, content)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert on_disk(tmp_path) == []
    assert app.service.store._held.total() == 0


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "text/plain; boundary=x", "multipart/;"])
def test_a_body_that_is_no_form_is_refused(app, kind):
    assert post(app, FILE + PURPOSE + END, kind).status_code == 415


def test_a_boundary_that_is_long_is_refused(app):
    assert post(app, b"x", f"multipart/form-data; boundary={'b' * 5000}").status_code == 400


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..\\..\\passwd", "a/b/../passwd"])
def test_a_name_that_is_a_path_is_its_last_part(app, tmp_path, name):
    file = app.upload(b"abc", name)
    assert file["filename"] == "passwd"
    assert on_disk(tmp_path) == [file["id"]]


@pytest.mark.parametrize("name", ["\x9eÌ¶ý;", "grün", ""])
def test_names_of_fields_may_be_anything_and_what_is_unknown_is_told(app, name):
    response = post(app, FILE + PURPOSE + part(name, b"x") + END)
    assert response.status_code == 200, response.text
    assert "x-tureen-ignored" in response.headers


@pytest.mark.parametrize("file_id", ["..", "../batches.sqlite", "%2e%2e%2fbatches.sqlite", "file-", "x" * 5000])
@pytest.mark.parametrize("rest", ["", "/content"])
def test_an_id_is_looked_up_and_never_a_path(app, file_id, rest):
    assert app.request("GET", f"/v1/files/{file_id}{rest}").status_code == 404


def test_a_file_that_is_too_large_is_refused_before_it_is_whole_and_leaves_nothing(app, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "MAX_FILE_BYTES", 1000)
    num_sent = 0

    async def pieces():
        nonlocal num_sent
        yield PURPOSE + FILE.removesuffix(b"\r\n")
        for _ in range(100):
            num_sent += 1
            yield b"x" * 500
        yield b"\r\n" + END

    response = post(app, pieces())
    assert (response.status_code, response.json()["error"]["param"]) == (413, "file")
    assert num_sent < 10
    assert on_disk(tmp_path) == []


def test_a_body_larger_than_any_file_is_refused_by_its_length_alone(app):
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "content-length": str(1 << 30)}
    response = app.request("POST", "/v1/files", content=b"x", headers=headers)
    assert response.status_code == 413


def test_a_client_that_leaves_in_the_middle_leaves_nothing(app, tmp_path):
    messages = [{"type": "http.request", "body": PURPOSE + FILE[:-2] + b"x" * 1000, "more_body": True}]
    messages.append({"type": "http.disconnect"})
    seen = []

    async def receive():
        seen.append(on_disk(tmp_path))
        return messages.pop(0)

    async def send(_):
        pass

    async def scenario():
        headers = [(b"host", b"127.0.0.1"), (b"content-type", f"multipart/form-data; boundary={BOUNDARY}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/files", "raw_path": b"/v1/files", "headers": headers}
        more = {"query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http"}
        await app.app(scope | more | {"http_version": "1.1"}, receive, send)

    app.run(scenario())
    assert len(seen[-1]) == 1
    assert on_disk(tmp_path) == []
    assert app.service.store._held.total() == 0


# ---- room


def test_a_client_keeps_no_more_bytes_than_it_may_and_what_it_deletes_makes_room(tmp_path):
    with BatchApp(tmp_path / "kept", max_batch_bytes=1000) as app:
        first = app.upload(b"x" * 600)
        refused = app.send(b"x" * 500)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "storage_full")
        assert on_disk(tmp_path) == [first["id"]]
        assert app.request("DELETE", f"/v1/files/{first['id']}").json() == {
            "id": first["id"],
            "object": "file",
            "deleted": True,
        }
        assert on_disk(tmp_path) == []
        app.upload(b"x" * 500)
    with BatchApp(tmp_path / "kept", max_batch_bytes=1000) as app:
        assert app.send(b"x" * 501).status_code == 413
        app.upload(b"x" * 500)


def test_uploads_at_the_same_time_count_together(tmp_path):
    with BatchApp(tmp_path / "kept", max_batch_bytes=1000) as app:

        async def scenario():
            how = {"files": {"file": ("a", b"x" * 400)}, "data": {"purpose": "batch"}}
            return await asyncio.gather(*(app.http.post("/v1/files", **how) for _ in range(5)))

        statuses = sorted(response.status_code for response in app.run(scenario()))
        assert statuses == [200, 200, 413, 413, 413]


def test_a_client_has_no_more_files_than_it_may(app, tmp_path, monkeypatch):
    monkeypatch.setattr("tureen.batches.store.MAX_FILES", 2)
    files = [app.upload(b"")["id"] for _ in range(2)]
    assert app.send(b"").json()["error"]["code"] == "storage_full"
    assert sorted(on_disk(tmp_path)) == sorted(files)


# ---- lists and ends


def test_files_are_listed_in_pages_in_either_order(app):
    ids = [app.upload(str(index))["id"] for index in range(5)]
    whole = app.get("/v1/files")
    assert [file["id"] for file in whole["data"]] == ids[::-1]
    assert (whole["first_id"], whole["last_id"], whole["has_more"]) == (ids[4], ids[0], False)
    page = app.get(f"/v1/files?order=asc&limit=2&after={ids[1]}")
    assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[2:4], True)
    assert app.get("/v1/files?purpose=batch_output")["data"] == []
    for query in ("limit=0", "limit=10001", "limit=-1", "limit=x", "order=up", "after=nothing", "porpuse=batch"):
        assert app.request("GET", f"/v1/files?{query}").status_code == 400, query


def test_the_input_of_a_batch_that_has_not_ended_cannot_be_deleted(tmp_path):
    with BatchApp(tmp_path / "kept", slow=True) as app:
        batch = app.begin([line("r", ROUTE, prompt="abc", max_tokens=1000)])
        path = f"/v1/files/{batch['input_file_id']}"
        assert app.request("DELETE", path).status_code == 409
        app.request("POST", f"/v1/batches/{batch['id']}/cancel")
        app.ended(batch)
        assert app.request("DELETE", path).status_code == 200
        assert app.request("GET", path).status_code == 404


def test_a_file_goes_when_its_time_is_over(app, tmp_path):
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file, other = app.upload(b"abc", **fields), app.upload(b"abc")
    assert file["expires_at"] == file["created_at"] + 3600
    store = app.service.store
    app.run(store.sweep(file["expires_at"] - 1))
    assert len(on_disk(tmp_path)) == 2
    app.run(store.sweep(file["expires_at"]))
    assert on_disk(tmp_path) == [other["id"]]
    assert [kept["id"] for kept in app.get("/v1/files")["data"]] == [other["id"]]


def test_answers_go_when_the_batch_said_so(app):
    expiry = {"anchor": "created_at", "seconds": 7200}
    ended = app.ended(app.begin([line("r")], output_expires_after=expiry))
    file = app.get(f"/v1/files/{ended['output_file_id']}")
    assert (file["purpose"], file["expires_at"]) == ("batch_output", file["created_at"] + 7200)


# ---- the folder


def test_nobody_else_may_read_what_is_kept(app, tmp_path):
    app.ended(app.begin([line("r"), line("s", max_tokens=-3)]))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_any_more_is_not_opened(app, tmp_path, kind):
    file = app.upload(b"abc")
    path = tmp_path / "kept" / "files" / file["id"]
    path.unlink()
    if kind == "link":
        path.symlink_to("/etc/passwd")
    else:
        os.mkfifo(path)
    assert app.request("GET", f"/v1/files/{file['id']}/content").status_code == 404


def test_uploads_that_a_crash_cut_short_are_gone_after_a_restart(tmp_path):
    with BatchApp(tmp_path / "kept") as app:
        kept = app.upload(b"abc")["id"]
    (tmp_path / "kept" / "files" / records.new_id("file-")).write_bytes(b"half of a fi")
    with BatchApp(tmp_path / "kept"):
        assert on_disk(tmp_path) == [kept]


@pytest.mark.parametrize("limit", ["123456789x", "1" * 5000, "x", "-1"])
def test_a_limit_that_is_no_number_is_named(app, limit):
    for path in ("/v1/files", "/v1/batches"):
        refused = app.request("GET", f"{path}?limit={limit}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "limit"


def test_a_folder_of_the_operator_s_own_files_keeps_them(tmp_path):
    own = tmp_path / "kept" / "files"
    own.mkdir(parents=True, mode=0o700)
    own.parent.chmod(0o700)
    (own / "thesis.txt").write_text("years of work")
    (own / "drafts").mkdir()
    with BatchApp(tmp_path / "kept") as app:
        app.upload("{}")
    assert (own / "thesis.txt").read_text() == "years of work"


def test_what_would_have_no_effect_in_an_upload_is_refused_where_that_is_asked_for(app, tmp_path):
    content = part("zorkmid", b"1") + PURPOSE + FILE + END
    assert post(app, content).headers["x-tureen-ignored"] == "zorkmid"
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "x-tureen-strict": "1"}
    refused = app.request("POST", "/v1/files", content=content, headers=headers)
    assert refused.json()["error"]["param"] == "zorkmid"
    with BatchApp(tmp_path / "other", unknown_fields="refuse") as strict:
        assert post(strict, content).json()["error"]["param"] == "zorkmid"


def test_an_upload_whose_client_leaves_while_it_is_kept_is_there_and_counted(app):
    async def leave() -> None:
        async with upload.uploading(app.service.store, "") as receiving:
            await receiving.write(b"abc")
            await receiving.keep("in.jsonl", "batch", None)

    async def cancel_at_the_insert() -> None:
        store, begun = app.service.store, asyncio.Event()
        add, may_end = store.add_file, asyncio.Event()

        async def add_file(file) -> None:
            begun.set()
            await may_end.wait()
            await add(file)

        store.add_file = add_file
        leaving = asyncio.create_task(leave())
        await begun.wait()
        store.add_file = add
        may_end.set()
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

    app.run(cancel_at_the_insert())
    [file] = app.request("GET", "/v1/files").json()["data"]
    assert app.request("GET", f"/v1/files/{file['id']}/content").content == b"abc"
    assert app.request("DELETE", f"/v1/files/{file['id']}").status_code == 200
    assert app.service.store._held[""] == 0
