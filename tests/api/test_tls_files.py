"""Files and flags that do not fit, or leave a server open: `tureen serve` says so in one line, before it looks for the
model."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import ssl
import sys
from pathlib import Path

import pytest
from throwaway_ca import EXPIRED, FUTURE, VALID, Authority, Pair

from tureen.cli import command_line as cli
from tureen.config import Config
from tureen.errors import StartupError
from tureen.http.tls import load_context, subject_name


@pytest.fixture(autouse=True)
def process_state():
    """`tureen serve` owns its process; here it is a guest."""
    root, interval, hang_up = logging.getLogger(), sys.getswitchinterval(), signal.getsignal(signal.SIGHUP)
    handlers, level = root.handlers[:], logging.getLogger("tureen").level
    yield
    root.handlers[:] = handlers
    logging.getLogger("tureen").setLevel(level)
    sys.setswitchinterval(interval)
    signal.signal(signal.SIGHUP, hang_up)


@pytest.fixture
def refused(capsys):
    def run(**settings: str) -> str:
        """The one line on stderr of a server that does not start."""
        arguments = ["serve", "--model-path", "/no-such-model", "--port", "0"]
        for name, value in settings.items():
            arguments += [f"--{name.replace('_', '-')}", value]
        assert cli.main(arguments) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("tureen: ")
        assert printed.err.count("\n") == 1, printed.err
        assert "no-such-model" not in printed.err
        return printed.err

    return run


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.server = self.ca.issue("server", for_server=True)

    def settings(self, pair: Pair | None = None, **more: str) -> dict[str, str]:
        pair = pair or self.server
        return {"tls_cert": pair.cert, "tls_key": pair.key} | more

    def file(self, name: str, content: str, mode: int = 0o600) -> str:
        path = self.folder / name
        path.write_text(content)
        path.chmod(mode)
        return str(path)


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("setting", ["tls_cert", "tls_key", "tls_ca", "tls_crl", "tls_key_password_file"])
@pytest.mark.parametrize("kind", ["missing", "a folder", "empty", "garbage", "a pipe"])
def test_a_file_that_cannot_be_used_is_named_with_its_flag(world: World, refused, setting, kind):
    path = world.folder / "broken"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.write_text("" if kind == "empty" else "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        path.chmod(0o600)
    encrypted = world.ca.issue("encrypted", for_server=True, password="x")
    settings = world.settings(encrypted if setting == "tls_key_password_file" else None, tls_ca=world.ca.cert)
    line = refused(**settings | {setting: str(path)})
    assert str(path) in line
    assert f"--{setting.replace('_', '-')}" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(world: World, refused):
    Path(world.server.key).chmod(0)
    assert "--tls-key" in refused(**world.settings())


def test_a_key_of_another_certificate_is_named_with_both_files(world: World, refused):
    other = world.ca.issue("other", for_server=True)
    line = refused(**world.settings(Pair(world.server.cert, other.key)))
    assert f"--tls-key {other.key}" in line
    assert world.server.cert in line


@pytest.mark.parametrize(("valid", "words"), [(EXPIRED, "expired at 2"), (FUTURE, "not valid before 2")])
def test_a_server_certificate_out_of_its_time_is_named(world: World, refused, valid, words):
    pair = world.ca.issue("late", for_server=True, valid=valid)
    line = refused(**world.settings(pair))
    assert f"--tls-cert {pair.cert}" in line
    assert words in line


def test_an_expired_certificate_behind_the_server_s_is_named(world: World, refused):
    (world.folder / "old").mkdir()
    old = Authority(world.folder / "old", "old", valid=EXPIRED)
    chain = world.file("chain.pem", Path(world.server.cert).read_text() + Path(old.cert).read_text())
    line = refused(**world.settings(Pair(chain, world.server.key)))
    assert f"--tls-cert {chain}" in line
    assert "expired" in line


def test_an_expired_ca_is_named(world: World, refused):
    old = Authority(world.folder, "old", valid=EXPIRED)
    line = refused(**world.settings(tls_ca=old.cert))
    assert f"--tls-ca {old.cert}" in line
    assert "expired" in line


@pytest.mark.parametrize(("valid", "words"), [(EXPIRED, "expired at 2"), (FUTURE, "not valid before 2")])
def test_a_revocation_list_out_of_its_time_is_named(world: World, refused, valid, words):
    crl = world.ca.revoke(valid=valid)
    line = refused(**world.settings(tls_ca=world.ca.cert, tls_crl=crl))
    assert f"--tls-crl {crl}" in line
    assert words in line


def test_a_revocation_list_of_another_ca_is_named(world: World, refused):
    (world.folder / "other").mkdir()
    for other in (Authority(world.folder / "other"), Authority(world.folder / "other", "other-name")):
        crl = other.revoke()
        line = refused(**world.settings(tls_ca=world.ca.cert, tls_crl=crl))
        assert f"--tls-crl {crl}" in line
        assert "not signed by a CA in --tls-ca" in line


def test_a_ca_without_its_revocation_list_is_named(world: World, refused):
    second = Authority(world.folder, "second")
    both = world.file("both.pem", Path(world.ca.cert).read_text() + Path(second.cert).read_text())
    line = refused(**world.settings(tls_ca=both, tls_crl=world.ca.revoke()))
    assert "CN=second" in line


def test_a_certificate_among_the_revocation_lists_does_not_become_a_ca(world: World, refused):
    other = Authority(world.folder, "other")
    mixed = world.file("mixed.pem", Path(world.ca.revoke()).read_text() + Path(other.cert).read_text())
    line = refused(**world.settings(tls_ca=world.ca.cert, tls_crl=mixed))
    assert f"--tls-crl {mixed}" in line


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_a_secret_that_everybody_may_read_or_change_is_named_with_the_command_to_run(world: World, refused, mode):
    Path(world.server.key).chmod(mode)
    line = refused(**world.settings())
    assert f"--tls-key {world.server.key}" in line
    assert "chmod 600" in line
    for flag, settings in {
        "--tls-key-password-file": world.settings(world.ca.issue("locked", for_server=True, password="x")),
        "--api-key-file": {},
    }.items():
        path = world.file("secret", "x", mode)
        assert f"{flag} {path}" in refused(**settings, **{flag[2:].replace("-", "_"): path})


def test_a_secret_that_a_group_may_read_is_taken(world: World, refused):
    Path(world.server.key).chmod(0o640)
    assert "--tls-ca" in refused(**world.settings(tls_ca="missing"))  # the next file is the fault


@pytest.mark.parametrize("password", ["wr0ng", "", "\n", "x" * 5000])
def test_a_wrong_password_is_named_and_not_shown(world: World, refused, password):
    pair = world.ca.issue("locked", for_server=True, password="right")
    path = world.file("password", password)
    line = refused(**world.settings(pair, tls_key_password_file=path))
    assert path in line
    assert "wr0ng" not in line


def test_a_missing_password_is_asked_for_by_a_flag_and_never_on_the_terminal(world: World, refused):
    pair = world.ca.issue("locked", for_server=True, password="right")
    line = refused(**world.settings(pair))
    assert f"--tls-key {pair.key}" in line
    assert "--tls-key-password-file" in line


def test_a_password_for_a_key_without_one_is_refused(world: World, refused):
    path = world.file("password", "x")
    assert path in refused(**world.settings(tls_key_password_file=path))


@pytest.mark.parametrize(
    ("names", "needed"),
    [
        (["tls_key"], "--tls-cert"),
        (["tls_cert"], "--tls-key"),
        (["tls_ca"], "--tls-cert"),
        (["tls_cert", "tls_key", "tls_crl"], "--tls-ca"),
        (["tls_cert", "tls_key", "tls_client_auth"], "--tls-ca"),
        (["tls_key_password_file"], "--tls-key"),
    ],
)
def test_a_flag_that_needs_another_names_it(world: World, refused, names, needed):
    values = world.settings(tls_ca=world.ca.cert, tls_crl="crl.pem", tls_client_auth="required")
    values["tls_key_password_file"] = "password"
    line = refused(**{name: values[name] for name in names})
    assert f"it needs {needed} too" in line
    assert f"--{names[-1].replace('_', '-')}" in line


def test_a_small_rsa_key_is_refused(world: World, refused):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    pair = Pair(str(world.folder / "small.pem"), str(world.folder / "small.key.pem"))
    command = f"openssl req -x509 -newkey rsa:1024 -nodes -days 1 -subj /CN=x -out {pair.cert} -keyout {pair.key}"
    assert os.system(f"{command} 2>/dev/null") == 0
    assert "EE_KEY_TOO_SMALL" in refused(**world.settings(pair))


@pytest.mark.parametrize("kind", ["openssl ec -aes256", "openssl pkcs8 -topk8"])
def test_keys_as_openssl_encrypts_them_are_taken(world: World, refused, kind):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    target, password = world.folder / "by-openssl.key.pem", world.file("password", "pass\n")
    command = f"{kind} -in {world.server.key} -passout pass:pass -out {target}"
    assert os.system(f"{command} 2>/dev/null") == 0
    target.chmod(0o600)
    settings = world.settings(Pair(world.server.cert, str(target)), tls_key_password_file=password)
    assert "--tls-ca" in refused(**settings, tls_ca="missing")  # the next file is the fault
    assert str(target) in refused(**settings | {"tls_key_password_file": world.file("password", "no\n")})


def test_what_fits_is_taken(world: World):
    crl = world.ca.revoke(valid=VALID)
    settings = world.settings(tls_ca=world.ca.cert, tls_crl=crl)
    assert isinstance(load_context(Config(**settings)), ssl.SSLContext)
    assert load_context(Config()) is None


@pytest.fixture
def outside(monkeypatch):
    """This machine is no container and its user is not root, wherever the tests run."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("tureen.server.CONTAINER_MARKS", ())
    for name in ("container", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def warned(capsys, monkeypatch):
    def refuse(_) -> None:
        raise StartupError("this test goes no further")

    monkeypatch.setattr("tureen.server.bind", refuse)

    def run(*arguments: str) -> list[str]:
        """The warnings of a server before it listens."""
        assert cli.main(["serve", *arguments]) == 1
        return [line for line in capsys.readouterr().err.splitlines() if "warning" in line.lower()]

    return run


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost.localdomain"])
def test_a_server_that_everybody_reaches_without_a_key_says_so_in_one_line_with_what_mends_it(outside, warned, host):
    (line,) = warned("--host", host)
    assert f"--host {host} " in line
    assert "everyone who reaches this machine" in line
    for flag in ("--api-key", "--api-key-file", "--tls-ca"):
        assert flag in line


def test_who_asks_for_a_key_or_a_certificate_or_serves_this_machine_only_is_not_warned(outside, warned, world):
    keys = world.file("keys", "ann k1\n")
    for arguments in ((), ("--host", "127.0.0.1"), ("--host", "localhost"), ("--host", "::1")):
        assert warned(*arguments) == []
    pair = ("--tls-cert", world.server.cert, "--tls-key", world.server.key)
    for arguments in (("--api-key", "k"), ("--api-key-file", keys), (*pair, "--tls-ca", world.ca.cert)):
        assert warned("--host", "0.0.0.0", *arguments) == []
    assert len(warned("--host", "0.0.0.0", *pair)) == 1
    optional = ("--tls-ca", world.ca.cert, "--tls-client-auth", "optional")
    assert len(warned("--host", "0.0.0.0", *pair, *optional)) == 1


@pytest.mark.parametrize("mark", ["a file", "container", "KUBERNETES_SERVICE_HOST"])
def test_inside_a_container_that_is_as_it_must_be(outside, warned, tmp_path, mark):
    if mark == "a file":
        outside.setattr("tureen.server.CONTAINER_MARKS", (tmp_path / "not there", tmp_path))
    else:
        outside.setenv(mark, "docker")
    assert warned("--host", "0.0.0.0") == []


def test_a_server_of_root_is_warned_of_in_one_line_that_says_what_to_do_instead(outside, warned):
    outside.setattr("os.geteuid", lambda: 0)
    (line,) = warned()
    assert "running as root" in line
    for place in ("deploy/systemd/tureen.service", "deploy/docker/Dockerfile"):
        assert place in line
        assert "USER" in (Path(__file__).parents[2] / place).read_text().upper()


NAMES = (
    (None, ""),
    ({}, ""),
    ({"subject": ((("organizationName", "o"),), (("commonName", "alice"),))}, "alice"),
    ({"subject": ((("commonName", "outer"),), (("commonName", "inner"),))}, "inner"),
    ({"subject": (), "subjectAltName": (("DNS", "a.example"), ("DNS", "b"))}, "a.example"),
    ({"subject": ((("commonName", ""),),), "serialNumber": "0A"}, "serial 0A"),
    ({"subject": ((("commonName", "Zoë"),),)}, "Zoë"),
)
"""Certificates, and the name of each."""


def test_the_name_is_the_common_name_or_the_next_best_as_one_short_printable_line():
    assert [subject_name(certificate) for certificate, _ in NAMES] == [name for _, name in NAMES]
    hostile = ["a\r\nINFO all is well", "a\x1b[31m", "x" * 65, "x" * 66, "\u202egnp", "\ud800", "a\0b", "a?b" * 40]
    names = [subject_name({"subject": ((("commonName", one),),)}) for one in hostile]
    assert len(set(names)) == len(hostile)
    for name in names:
        assert len(name) <= 64
        assert name.isprintable()
