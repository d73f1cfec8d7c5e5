"""Who may call what: levels of routes, keys, callers of this machine, the limit of one client."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import re
import socket
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from app_under_test import LOCAL, App
from served_app import ServedApp
from starlette.responses import Response
from starlette.routing import Route
from timeouts import until
from wire import told

from tureen.clients.keys import load_keys
from tureen.config import Config
from tureen.errors import StartupError
from tureen.http.call import SCOPE_KEY, ClientCall
from tureen.http.origins import check_hosts

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
OPEN = {
    "/health",
    "/ready",
    "/ping",
    "/health_scheduler",
    "/health_generate",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/compat",
    "/compat.json",
    "/playground/{name:path}",
    "/v2/health/live",
    "/v2/health/ready",
}
ADMIN = {
    "/flush_cache",
    "/freeze_gc",
    "/pause_generation",
    "/continue_generation",
    "/load_lora_adapter",
    "/models/load",
    "/models/pull",
    "/models/unload",
    "/unload_lora_adapter",
    "/update_weights_from_disk",
    "/update_weights",
    "/update_weight_version",
    "/update_weights_from_tensor",
    "/update_weights_from_safetensors",
    "/begin_weight_update",
    "/start_weight_update",
    "/end_weight_update",
    "/finish_weight_update",
    "/abort_weight_update",
    "/init_weights_update_group",
    "/init_weight_transfer_engine",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
    "/get_weights_by_name",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/start_profile",
    "/stop_profile",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/configure_logging",
    "/usage",
    "/pause",
    "/resume",
    "/is_paused",
    "/reset_prefix_cache",
    "/get_world_size",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
"""All other routes are for users."""
BESIDE_NAMES = {
    "/models/load", "/models/pull", "/models/unload", "/v1/responses/input_tokens", "/responses/input_tokens",
} | {
    f"/v2/models/{{model:path}}/{verb}" for verb in ("generate", "generate_stream", "infer", "stopInfer")
}  # fmt: skip
"""Other methods than POST ask there for a model or a response of that name, as `/models/{name}` does."""

USER_KEY, ADMIN_KEY, FILE_KEY = "user-k3y", "admin-k3y", "file-k3y"
CREDENTIALS = {"none": None, "wrong": "nobody-s", "user": USER_KEY, "file": FILE_KEY, "admin": ADMIN_KEY}
REMOTE = ("10.1.2.3", 5555)


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def key_file(
    folder, content: str = f"# our clients\n\n  \nalice {FILE_KEY}\n\tbob\tbob-k3y  \n", mode: int = 0o600
) -> str:
    path = folder / "keys"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def concrete(route: Route) -> str:
    return re.sub(r"{\w+}", "some", re.sub(r"{\w+:path}", "fake-model", route.path))


def stub_handlers(app: App) -> None:
    """Whoever gets past the gate gets a 204."""
    for route in app.app.routes:
        route.app = Response(status_code=204)


def call_from(app: App, client: tuple[str, int], method: str, path: str, **how) -> httpx.Response:
    async def call():
        transport = httpx.ASGITransport(app.app, raise_app_exceptions=False, client=client)
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as http:
            return await http.request(method, path, **how)

    return app.run(call())


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """All kinds of keys at once; handlers are stubs."""
    path = key_file(tmp_path_factory.mktemp("keys"))
    with App(api_key=USER_KEY, admin_api_key=ADMIN_KEY, api_key_file=path) as app:
        stub_handlers(app)
        yield app


def test_every_route_says_who_may_call_it(app: App):
    levels = {route.path: getattr(route, "access", None) for route in app.app.routes}
    assert len(levels) > 10
    assert {path for path, level in levels.items() if level == "open"} == OPEN
    assert {path for path, level in levels.items() if level == "admin"} == ADMIN
    assert {level for path, level in levels.items() if path not in OPEN | ADMIN} == {"user"}


@pytest.mark.parametrize("who", CREDENTIALS)
def test_each_route_answers_each_credential_as_documented(locked: App, who):
    wrong = []
    methods: dict[str, set[str]] = {}
    for route in locked.app.routes:
        methods.setdefault(route.path, set()).update(route.methods)
    for route in locked.app.routes:
        for method in METHODS if route.path not in BESIDE_NAMES else ["POST"]:
            refusal = {"none": 401, "wrong": 401}.get(who)
            if route.path in ADMIN and who in ("user", "file"):
                refusal = 403
            if route.path in OPEN:
                refusal = None
            below = 404 if method == "POST" and route.path.endswith("}") else 405  # it is taken for a route, not an id
            want = refusal or (204 if method in methods[route.path] else below)
            response = locked.request(method, concrete(route), headers=bearer(CREDENTIALS[who]))
            if response.status_code != want or ("www-authenticate" in response.headers) != (want == 401):
                wrong.append((method, route.path, response.status_code, want))
    assert wrong == []


@pytest.mark.parametrize("who", CREDENTIALS)
def test_an_unknown_path_tells_nothing_without_a_key(locked: App, who):
    want = 401 if who in ("none", "wrong") else 404
    for method in METHODS:
        assert locked.request(method, "/nope", headers=bearer(CREDENTIALS[who])).status_code == want


def test_a_route_without_a_level_is_closed_even_to_the_admin_key():
    with App(admin_api_key=ADMIN_KEY) as app:
        app.app.router.routes.append(Route("/forgotten", Response(status_code=204)))
        app.app.router.routes.append(Route("/mistyped", Response(status_code=204)))
        app.app.routes[-1].access = "usr"
        for path in ("/forgotten", "/mistyped"):
            response = app.request("GET", path, headers=bearer(ADMIN_KEY))
            assert (response.status_code, response.json()["error"]["code"]) == (403, "closed_route")


def test_one_key_alone_opens_everything():
    with App(api_key=USER_KEY) as app:
        stub_handlers(app)
        for route in app.app.routes:
            method = sorted(route.methods)[-1]
            assert app.request(method, concrete(route), headers=bearer(USER_KEY)).status_code == 204


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "; send the header 'Authorization: Bearer KEY'"),
        ({"authorization": "Bearer wrong"}, "the key that was sent is wrong"),
        ({"x-api-key": "wrong"}, "the key that was sent is wrong"),
        ({"authorization": "Basic d3Jvbmc="}, "not of the form 'Bearer KEY'"),
        ({"authorization": USER_KEY}, "not of the form 'Bearer KEY'"),
    ],
    ids=["no key", "wrong key", "wrong key as Anthropic sends it", "another scheme", "no scheme"],
)
@pytest.mark.parametrize(("path", "needed"), [("/v1/models", "an API key"), ("/flush_cache", "the server's admin key")])
def test_a_wrong_key_is_not_answered_as_a_missing_one(headers, said, path, needed):
    with App(api_key=USER_KEY, admin_api_key=ADMIN_KEY) as app:
        refused = app.request("GET", path, headers=headers)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 401
    assert f"needs {needed}" in message
    assert said in message


def test_with_an_admin_key_alone_users_need_none():
    with App(admin_api_key=ADMIN_KEY) as app:
        assert app.generate(text="say:a")["text"] == "a"
        assert app.request("POST", "/generate", json={"text": "say:a"}, headers=bearer("EMPTY")).status_code == 200
        assert app.request("POST", "/flush_cache").status_code == 401
        assert app.request("POST", "/flush_cache", headers=bearer("EMPTY")).status_code == 401
        assert app.request("POST", "/flush_cache", headers=bearer(ADMIN_KEY)).status_code == 200


def test_a_key_of_the_file_never_opens_an_admin_route(tmp_path):
    with App(api_key_file=key_file(tmp_path)) as app:
        assert app.request("POST", "/flush_cache").status_code == 401
        refused = app.request("POST", "/flush_cache", headers=bearer(FILE_KEY))
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    with App(api_key_file=key_file(tmp_path), api_key=USER_KEY) as app:
        assert app.request("POST", "/flush_cache", headers=bearer(FILE_KEY)).status_code == 403
        assert app.request("POST", "/flush_cache", headers=bearer(USER_KEY)).status_code == 200


def test_without_keys_admin_routes_are_for_this_machine():
    with App(host="0.0.0.0") as app:
        for client in (("127.0.0.1", 1), ("127.9.9.9", 1), ("::1", 1), ("::ffff:127.0.0.1", 1)):
            assert call_from(app, client, "POST", "/flush_cache").status_code == 200, client
        for client in (REMOTE, ("::ffff:10.1.2.3", 1), ("2001:db8::1", 1), ("unix", 1)):
            refused = call_from(app, client, "POST", "/flush_cache")
            assert refused.status_code == 403, client
            assert "--admin-api-key" in refused.json()["error"]["message"]
        assert call_from(app, REMOTE, "POST", "/generate", json={"text": "say:a"}).json()["text"] == "a"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "127.0.0.1"},
        {"x-forwarded-for": "10.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"x-real-ip": "::1"},
        {"x-forwarded-host": "localhost"},
        {"via": "1.1 proxy"},
        {"host": "rebound.example"},
        {"host": ""},
    ],
)
def test_whom_a_proxy_or_a_renamed_page_speaks_for_is_not_this_machine(headers):
    with App(host="0.0.0.0") as app:
        for client in (("127.0.0.1", 1), REMOTE):
            assert call_from(app, client, "POST", "/flush_cache", headers=headers).status_code == 403


OF_OTHER_PAGES = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:8888"},
    {"origin": "http://127.0.0.1.evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "origin": LOCAL},
]
OF_OWN_PAGES = [
    {"origin": LOCAL},
    {"sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
    {"sec-fetch-site": "same-origin", "origin": LOCAL},
]


def test_a_page_of_another_site_in_the_operator_s_browser_may_not_administer():
    with App() as app:
        stub_handlers(app)
        for headers, want in [(one, 403) for one in OF_OTHER_PAGES] + [(one, 204) for one in OF_OWN_PAGES]:
            for path in sorted(ADMIN):
                methods = {method for route in app.app.routes if route.path == path for method in route.methods}
                for method in sorted(methods & {"GET", "POST"}):
                    simple = headers | {"content-type": "text/plain"}
                    assert app.request(method, path, headers=simple).status_code == want, (method, path, headers)
    with App(admin_api_key=ADMIN_KEY) as app:
        headers = OF_OTHER_PAGES[0] | bearer(ADMIN_KEY)
        assert app.request("POST", "/flush_cache", headers=headers).status_code == 200


def test_no_link_address_or_picture_in_a_browser_makes_a_route_act():
    """A route that takes POST besides GET acts; one that takes GET only tells."""
    clicked, typed, picture = (
        {"sec-fetch-site": site, "sec-fetch-mode": mode}
        for site, mode in (("same-origin", "navigate"), ("none", "navigate"), ("cross-site", "no-cors"))
    )
    with App() as app:
        stub_handlers(app)
        acting = [route for route in app.app.routes if {"GET", "POST"} <= route.methods]
        assert {"/flush_cache", "/start_profile", "/open_session", "/close_session"} <= {each.path for each in acting}
        for route in acting:
            for method, headers in itertools.product(("GET", "HEAD"), (clicked, typed, picture)):
                assert app.request(method, concrete(route), headers=headers).status_code == 403, (method, route.path)
            for headers in ({}, {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}):
                assert app.request("GET", concrete(route), headers=headers).status_code == 204, route.path
        assert app.request("GET", "/flush_cache", headers=clicked).json()["error"]["code"] == "link"
        assert app.request("GET", "/usage", headers=clicked).status_code == 204, "it only tells"


REBOUND = ("evil.example", "evil.example:30000", "10.0.0.5.evil.example")
NEVER_REBOUND = ("10.0.0.5", "[2001:db8::1]:30000", "localhost", "gpu7", "gpu7.local", "t.ns.svc:80")


def test_a_page_whose_name_was_made_to_resolve_to_this_server_needs_a_key():
    """An address cannot be rebound, nor can a name without a dot or one outside the public DNS."""
    body = {"text": "say:a"}
    with App(host="0.0.0.0", allowed_hosts=("LLM.example.org",)) as app:
        for host in REBOUND:
            answer = app.request("POST", "/generate", json=body, headers={"host": host, "origin": f"http://{host}"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (403, "invalid_host")
            assert "--allowed-hosts" in error["message"]
            assert app.request("GET", "/v1/models", headers={"host": host}).status_code == 403
            assert app.request("GET", "/health", headers={"host": host}).status_code == 200, "open to anybody"
        for host in (*NEVER_REBOUND, socket.gethostname(), "llm.example.org"):
            assert app.request("POST", "/generate", json=body, headers={"host": host}).status_code == 200, host
    for settings in ({"host": "0.0.0.0"}, {}):
        with App(api_key=USER_KEY, **settings) as app:
            rebound = {"host": REBOUND[0]}
            assert app.request("POST", "/generate", json=body, headers=rebound).status_code == 401
            assert app.request("POST", "/generate", json=body, headers=rebound | bearer(USER_KEY)).status_code == 200
    with App(allowed_hosts=("*",)) as app:
        assert app.request("POST", "/generate", json=body, headers={"host": REBOUND[0]}).status_code == 200


def test_the_full_name_of_this_machine_is_its_own(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7")
    monkeypatch.setattr(socket, "getfqdn", lambda: "GPU7.example.org")
    monkeypatch.setattr("tureen.http.origins.threading.Thread", lambda target, daemon: SimpleNamespace(start=target))
    with App(host="0.0.0.0") as app:
        assert app.request("GET", "/v1/models", headers={"host": "gpu7.example.org"}).status_code == 200
        assert app.request("GET", "/v1/models", headers={"host": "gpu7.example.com"}).status_code == 403


@pytest.mark.parametrize(
    "host", ["http://llm.example.org", "llm.example.org:80", "llm.example.org/", "", "*.example.org"]
)
def test_what_is_no_host_name_is_refused_at_the_start(host):
    with pytest.raises(StartupError, match=r"--allowed-hosts .*such as llm\.example\.org"):
        check_hosts((host,))
    check_hosts(("llm.example.org", "*", "10.0.0.5", "[::1]"))


@pytest.mark.parametrize("headers", OF_OTHER_PAGES)
def test_a_page_of_another_site_may_not_spend_with_what_browsers_send_unasked(headers):
    with App() as app:
        body = json.dumps({"text": "say:a"})
        for kind, want in (
            ({}, 403),
            ({"content-type": "text/plain"}, 403),
            ({"content-type": "application/json"}, 200),
        ):
            answer = app.request("POST", "/generate", content=body, headers=headers | kind)
            assert answer.status_code == want, kind
        assert app.request("GET", "/v1/models", headers=headers).status_code == 200
        all_of_them = app.request("POST", "/abort_request", json={"abort_all": True}, headers=headers)
        assert all_of_them.status_code == 403


def test_only_who_may_administer_aborts_all(locked: App):
    with App(api_key=USER_KEY, admin_api_key=ADMIN_KEY) as app:
        for body, user, admin in (({"abort_all": True}, 403, 200), ({"rid": "x"}, 200, 200)):
            for key, want in ((USER_KEY, user), (ADMIN_KEY, admin)):
                response = app.request("POST", "/abort_request", json=body, headers=bearer(key))
                assert response.status_code == want, (body, key)
    with App(host="0.0.0.0") as app:
        body = {"abort_all": True}
        assert call_from(app, REMOTE, "POST", "/abort_request", json=body).status_code == 403
        assert call_from(app, ("127.0.0.1", 1), "POST", "/abort_request", json=body).status_code == 200


TARGETS = [
    "/flush_cache",
    "//flush_cache",
    "/flush_cache/",
    "/%66lush_cache",
    "/%2566lush_cache",
    "/health/../flush_cache",
    "/health/..%2fflush_cache",
    "/health%2f..%2fflush_cache",
    "/v1/models/../../flush_cache",
    "/./flush_cache",
    "/flush_cache;/health",
    "/flush_cache?x=/health",
    "/flush_cache%00",
    "/flush_cache%20",
    "/health?/flush_cache",
    "/health#/flush_cache",
    "/FLUSH_CACHE",
    "http://127.0.0.1/flush_cache",
    "http://evil.example/flush_cache",
    "http://user:pass@127.0.0.1/flush_cache",
    "https://127.0.0.1:1/flush_cache",
    "flush_cache",
    "\\flush_cache",
    "*",
    "127.0.0.1:80",
]
EXTRA = [
    "X-Forwarded-For: 127.0.0.1",
    "X-Forwarded-Proto: https",
    "Forwarded: for=127.0.0.1",
    "X-Original-URL: /flush_cache",
    "X-Rewrite-URL: /flush_cache",
    "X-HTTP-Method-Override: POST",
    "Authorization:",
    "Authorization: Bearer",
    "Authorization: Bearer \t",
    f"Authorization: bearer{ADMIN_KEY}",
    f"Authorization: Bearer  {ADMIN_KEY}",
    f"Authorization: Bearer {ADMIN_KEY}, Bearer x",
    f"Authorization: Basic {ADMIN_KEY}",
    f"Authorization : Bearer {ADMIN_KEY}",
    f"X-Api-Key: Bearer {ADMIN_KEY}",
    f"X-Api-Key:  {ADMIN_KEY} x",
    f"Api-Key: {ADMIN_KEY}",
    f"Cookie: Authorization=Bearer {ADMIN_KEY}",
]
ODD_METHODS = ["HEAD", "OPTIONS", "TRACE", "CONNECT", "DELETE", "PUT", "PATCH", "PROPFIND", "FLUSH", "get", "PRI"]


@pytest.fixture(scope="module")
def live():
    """A server with both keys whose engine tells what it was asked to do."""
    with App(api_key=USER_KEY, admin_api_key=ADMIN_KEY) as app:
        app.calls = []
        call = app.client.call

        async def note(name, **arguments):
            app.calls.append(name)
            return await call(name, **arguments)

        app.client.call = note
        yield app


def raw_status(app: App, *lines: str) -> int:
    """Status of the answer to exactly these lines; 0 = the connection was closed without one."""
    answer = told(app, ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode())
    return int((answer.partition(b"\r\n")[0].split() or [0, 0])[1])


def test_the_spy_sees_what_the_admin_key_does(live: App):
    live.calls.clear()
    status = raw_status(live, "GET /flush_cache HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {ADMIN_KEY}")
    assert (status, live.calls) == (200, ["flush_cache"])


@pytest.mark.parametrize("target", TARGETS)
def test_no_spelling_of_a_target_opens_an_admin_route(live: App, target):
    live.calls.clear()
    for method in ("GET", "POST"):
        for key in ("", f"Authorization: Bearer {USER_KEY}"):
            lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", *([key] if key else [])]
            status = raw_status(live, *lines)
            if target.startswith("/health?"):
                assert status in (200, 405)
            else:
                assert status in ((401, 400) if not key else (400, 403, 404, 405)), (method, key)
    assert live.calls == []


@pytest.mark.parametrize("line", EXTRA)
def test_no_header_opens_a_route(live: App, line):
    live.calls.clear()
    for path in ("/flush_cache", "/version"):
        assert raw_status(live, f"GET {path} HTTP/1.1", "Host: 127.0.0.1", line) in (400, 401)
    assert live.calls == []


@pytest.mark.parametrize("method", ODD_METHODS)
def test_no_method_opens_an_admin_route(live: App, method):
    live.calls.clear()
    for key in ("X-No: key", f"Authorization: Bearer {USER_KEY}"):
        status = raw_status(live, f"{method} /flush_cache HTTP/1.1", "Host: 127.0.0.1", key)
        assert status in (400, 401, 403, 405), (method, key)
    assert live.calls == []


@pytest.mark.parametrize("host", ["127.0.0.1/health?", "127.0.0.1/v1?", "evil.example", "127.0.0.1#", "localhost@evil"])
def test_no_host_header_opens_a_route(live: App, host):
    live.calls.clear()
    assert raw_status(live, "GET /flush_cache HTTP/1.1", f"Host: {host}") in (400, 401)
    assert live.calls == []


def test_a_second_request_in_a_connection_needs_its_own_key(live: App):
    first = f"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ADMIN_KEY}\r\n\r\n"
    second = "GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    answers = told(live, (first + second).encode())
    assert answers.count(b"HTTP/1.1 200") == 1
    assert answers.count(b"HTTP/1.1 401") == 1


def test_nothing_is_read_of_a_body_without_a_key(live: App):
    lines = ["POST /generate HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 1000000", "Content-Type: application/json"]
    assert raw_status(live, *lines) == 401


def test_a_key_is_compared_with_all_keys_in_constant_time(tmp_path, monkeypatch):
    keys = load_keys(Config(api_key=USER_KEY, admin_api_key=ADMIN_KEY, api_key_file=key_file(tmp_path)))
    compared = []

    def compare(one, other):
        compared.append((len(one), len(other)))
        return hmac_compare(one, other)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for given in (USER_KEY, ADMIN_KEY, FILE_KEY, "bob-k3y", "x", "", "x" * 10_000):
        compared.clear()
        keys.find(f"Bearer {given}".encode())
        assert compared == [(32, 32)] * 4


def test_a_key_is_known_by_its_name(tmp_path):
    keys = load_keys(Config(api_key=USER_KEY, api_key_file=key_file(tmp_path)))
    found = {key: keys.find(f"Bearer {key}".encode()) for key in (FILE_KEY, "bob-k3y", USER_KEY)}
    assert [key.name for key in found.values()] == ["alice", "bob", ""]
    for wrong in (b"", b"Bearer", b"Bearer ", FILE_KEY.encode(), b"Digest " + FILE_KEY.encode(), b"Bearer \xff"):
        assert keys.find(wrong) is None


def test_the_scheme_of_a_key_is_known_in_small_and_capital_letters():
    keys = load_keys(Config(api_key=USER_KEY))
    assert all(keys.find(f"{scheme} {USER_KEY}".encode()) for scheme in ("Bearer", "bearer", "BEARER", "bEaReR"))
    with App(api_key=USER_KEY, admin_api_key=ADMIN_KEY) as app:
        for scheme in ("bearer", "BEARER"):
            assert app.request("GET", "/version", headers={"authorization": f"{scheme} {USER_KEY}"}).status_code == 200
            assert app.request("GET", "/version", headers={"authorization": f"{scheme} {USER_KEY}x"}).status_code == 401
            flushed = app.request("GET", "/flush_cache", headers={"authorization": f"{scheme} {ADMIN_KEY}"})
            assert flushed.status_code == 200


def test_the_name_of_the_key_is_in_the_access_log_and_wins_over_the_certificate_s(tmp_path, caplog):
    with App(api_key_file=key_file(tmp_path), api_key=USER_KEY) as app, caplog.at_level("INFO", "tureen.http"):

        async def through_tls(scope, receive, send):
            await app.app(scope | {SCOPE_KEY: ClientCall(client_name="a-certificate")}, receive, send)

        for entrance, key, name in (
            (app.app, FILE_KEY, " by alice"),
            (through_tls, "bob-k3y", " by bob"),
            (through_tls, USER_KEY, " by a-certificate"),
            (app.app, USER_KEY, " ms"),
        ):
            caplog.clear()
            http = httpx.AsyncClient(transport=httpx.ASGITransport(entrance), base_url=LOCAL)
            assert app.run(http.get("/version", headers=bearer(key))).status_code == 200
            (line,) = [record.getMessage() for record in caplog.records]
            assert line.endswith(name)
            assert key not in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read it"),
        ("", "empty"),
        ("# nobody\n\n", "no keys"),
        ("alice\n", "line 1"),
        ("a k1\nalice key # comment\n", "line 2"),
        ("a k1\n\na k2\n", "line 3: the name 'a'"),
        ("a k1\nb k1\n", "line 2: this key"),
        (f"a {USER_KEY}\n", "line 1: this key"),
        ("a k\x001\n", "line 1"),
        (f"{'n' * 65} k1\n", "line 1"),
        ("a\x1b[31m k1\n", "line 1"),
        ("\xff\xfe", "UTF-8"),
    ],
)
def test_a_key_file_that_does_not_serve_is_refused_by_its_name_and_line(tmp_path, content, words):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
        path.chmod(0o600)
    with pytest.raises(StartupError) as refused:
        load_keys(Config(api_key=USER_KEY, api_key_file=str(path)))
    message = refused.value.message
    assert message.startswith(f"--api-key-file {path}")
    assert words in message
    assert "k1" not in message
    assert USER_KEY not in message
    assert message.isprintable()


def test_a_key_file_that_everybody_may_read_is_refused(tmp_path):
    with pytest.raises(StartupError, match="chmod 600"):
        load_keys(Config(api_key_file=key_file(tmp_path, mode=0o644)))


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\x00", "a\u200b"])
@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_a_key_that_no_header_can_carry_is_refused(name, key):
    with pytest.raises(StartupError, match=f"^--{name.replace('_', '-')}: the key must"):
        load_keys(Config(**{name: key}))


def test_one_key_for_both_levels_is_refused():
    with pytest.raises(StartupError, match=r"^--api-key: this key occurs twice"):
        load_keys(Config(api_key="same", admin_api_key="same"))


def test_no_secret_setting_is_in_an_answer(tmp_path):
    secrets = [
        field.name for field in msgspec.structs.fields(Config) if msgspec.inspect.type_info(field.type).extra["secret"]
    ]
    assert {"api_key", "admin_api_key"} <= set(secrets)
    with App(api_key=USER_KEY, admin_api_key=ADMIN_KEY, api_key_file=key_file(tmp_path)) as app:
        facts = app.request("GET", "/server_info", headers=bearer(ADMIN_KEY))
        assert [facts.json()[name] for name in secrets] == [None] * len(secrets)
        for path in ("/server_info", "/get_server_info", "/model_info", "/metrics", "/flush_cache", "/v1/models"):
            text = app.request("GET", path, headers=bearer(ADMIN_KEY)).text
            assert not any(key in text for key in (USER_KEY, ADMIN_KEY, FILE_KEY)), path


def test_one_client_may_not_run_more_than_its_share(tmp_path):
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 1900}}
    with App(slow=True, max_client_requests=2, api_key_file=key_file(tmp_path)) as app:

        async def scenario():
            def post(key, path="/generate", **content):
                return app.http.post(path, json=content, headers=bearer(key))

            running = [asyncio.create_task(post(FILE_KEY, **body, rid=f"r{i}")) for i in range(2)]
            await until(lambda: app.state.num_running >= 2)
            refused = await post(FILE_KEY, text="say:a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
            assert (await post("bob-k3y", text="say:a")).status_code == 200
            assert (await app.http.get("/version", headers=bearer(FILE_KEY))).status_code == 200
            assert (await post(FILE_KEY, "/abort_request", rid="r0")).json() == {"aborted": 1}
            assert (await running[0]).status_code == 200
            assert (await post(FILE_KEY, text="say:a")).status_code == 200
            running[1].cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for _ in range(3):
                assert (await post(FILE_KEY, text="say:a")).status_code == 200
                assert (await post(FILE_KEY, text=5)).status_code == 400

        app.run(scenario())
        app.check_idle()


def test_clients_without_a_name_share_by_their_address():
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 1500}}
    with App(slow=True, host="0.0.0.0", max_client_requests=1) as app:

        async def scenario():
            here, there = (
                httpx.AsyncClient(transport=httpx.ASGITransport(app.app, client=(address, 1)), base_url=LOCAL)
                for address in ("10.0.0.1", "10.0.0.2")
            )
            first = asyncio.create_task(here.post("/generate", json=body))
            await until(lambda: app.state.num_running)
            assert (await here.post("/generate", json={"text": "say:a"})).status_code == 429
            forged = await here.post("/generate", json={"text": "say:a"}, headers={"x-forwarded-for": "10.9.9.9"})
            assert forged.status_code == 429
            assert (await there.post("/generate", json={"text": "say:a"})).status_code == 200
            assert (await first).status_code == 200
            assert (await here.post("/generate", json={"text": "say:a"})).status_code == 200

        app.run(scenario())


def test_a_client_that_leaves_gives_its_share_back():
    with ServedApp(slow=True, max_client_requests=1) as server:
        body = json.dumps({"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 1900}})
        for _ in range(3):
            with httpx.stream("POST", f"{server.url}/generate", content=body) as running:
                assert running.status_code == 200
                assert httpx.post(f"{server.url}/generate", json={"text": "say:a"}).status_code == 429
            assert httpx.post(f"{server.url}/generate", json={"text": "say:a"}).status_code == 200


def test_a_proxy_s_claim_does_not_change_the_client_of_a_server():
    """The server trusts no header of a proxy; uvicorn would, from this address."""
    head = "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "X-Forwarded-For: 10.9.9.9\r\nX-Forwarded-Proto: https\r\n"
    content = b'{"text": "say:a"}'
    with App(max_client_requests=1, slow=True) as app:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 1900}}

        async def begin():
            running = asyncio.create_task(app.http.post("/generate", json=body))
            await until(lambda: app.state.num_running)
            return running

        running = app.run(begin())
        answer = told(app, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert answer.startswith(b"HTTP/1.1 429")
        running.cancel()
