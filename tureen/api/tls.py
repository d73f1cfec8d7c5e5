"""TLS: certificates, keys and revocation lists, checked before they are used; the name in a client's certificate."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from tureen.api.keys import read_file, read_secret
from tureen.config import Config
from tureen.errors import StartupError

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=2"
"""Of TLS 1.2: forward secret and authenticated. Level 2: no RSA key below 2048 bits, no SHA-1 signature."""

MAX_NAME_CHARS = 64
VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
CRL_BLOCK = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
OTHER_BLOCK = re.compile(rb"-----BEGIN (?!X509 CRL-----)")


def load_context(config: Config) -> ssl.SSLContext | None:
    """The server's side of TLS as the settings say; None = plain HTTP. Raises StartupError naming flag and file."""
    _check_flags(config)
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if config.tls_min_version == "1.3" else ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    # Without tickets a connection proves its certificate anew. With TLS 1.2 a client can still resume by session id,
    # but only with the context that knows it: never after a reload.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    _load_own(context, config.tls_cert, config.tls_key, config.tls_key_password_file)
    if config.tls_ca is not None:
        authorities = _load_authorities(context, config.tls_ca)
        if config.tls_crl is not None:
            _load_revoked(context, config.tls_crl, authorities)
        context.verify_mode = VERIFY[config.tls_client_auth or "required"]
    return context


def _check_flags(config: Config) -> None:
    needs = {
        "--tls-cert": (config.tls_cert, "--tls-key", config.tls_key),
        "--tls-key": (config.tls_key, "--tls-cert", config.tls_cert),
        "--tls-key-password-file": (config.tls_key_password_file, "--tls-key", config.tls_key),
        "--tls-ca": (config.tls_ca, "--tls-cert", config.tls_cert),
        "--tls-crl": (config.tls_crl, "--tls-ca", config.tls_ca),
        "--tls-client-auth": (_asks(config), "--tls-ca", config.tls_ca),
    }
    for flag, (value, other, other_value) in needs.items():
        if value is not None and other_value is None:
            raise StartupError(f"{flag} {value}: it needs {other} too")


def _asks(config: Config) -> str | None:
    return None if config.tls_client_auth == "none" else config.tls_client_auth


@contextlib.contextmanager
def _fault(flag: str, path: str, what: str) -> Iterator[None]:
    """What goes wrong inside is a StartupError: the parsers' own messages say little to an operator."""
    try:
        yield
    except (ValueError, TypeError, UnsupportedAlgorithm, OSError) as error:
        reason = f" ({error.reason})" if isinstance(error, ssl.SSLError) and error.reason else ""
        raise StartupError(f"{flag} {path}: {what}{reason}") from None


def _load_own(context: ssl.SSLContext, cert_path: str, key_path: str, password_path: str | None) -> None:
    chain = _certificates("--tls-cert", cert_path)
    password = None
    if password_path is not None:
        password = read_secret("--tls-key-password-file", password_path).rstrip(b"\r\n")
    public = _public_key(key_path, password, password_path)
    with _fault("--tls-cert", cert_path, "its kind of key is not supported"):
        certified = _encoded(chain[0].public_key())
    if public != certified:
        raise StartupError(
            f"--tls-key {key_path}: it is not the key of the first certificate in --tls-cert {cert_path}"
        )
    with _fault("--tls-cert", cert_path, f"TLS does not take it with --tls-key {key_path}"):
        context.load_cert_chain(cert_path, key_path, password=lambda: password or b"")  # never asks a terminal


def _public_key(path: str, password: bytes | None, password_path: str | None) -> bytes:
    content = read_secret("--tls-key", path)
    what = "there is no PEM private key in it"
    if b"ENCRYPTED" in content:
        what = f"the password in --tls-key-password-file {password_path} does not open it"
        if password is None:
            what = "it is encrypted; give the file with its password as --tls-key-password-file"
    elif password is not None:
        what += f", or it is not encrypted and --tls-key-password-file {password_path} is to be left out"
    with _fault("--tls-key", path, what):
        return _encoded(load_pem_private_key(content, password).public_key())


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _certificates(flag: str, path: str) -> list[x509.Certificate]:
    content = read_file(flag, path)
    with _fault(flag, path, "there is no proper PEM certificate in it"):
        found = x509.load_pem_x509_certificates(content)
    now = datetime.datetime.now(datetime.UTC)
    for certificate in found:
        if certificate.not_valid_after_utc < now:
            raise StartupError(
                f"{flag} {path}: a certificate in it expired at {certificate.not_valid_after_utc:%F %T} UTC"
            )
        if certificate.not_valid_before_utc > now:
            start = certificate.not_valid_before_utc
            raise StartupError(f"{flag} {path}: a certificate in it is not valid before {start:%F %T} UTC")
    return found


def _load_authorities(context: ssl.SSLContext, path: str) -> list[x509.Certificate]:
    authorities = _certificates("--tls-ca", path)
    pem = b"".join(authority.public_bytes(Encoding.PEM) for authority in authorities)
    with _fault("--tls-ca", path, "TLS does not take it"):
        context.load_verify_locations(cadata=pem.decode())
    return authorities


def _load_revoked(context: ssl.SSLContext, path: str, authorities: Sequence[x509.Certificate]) -> None:
    """Every certificate on the way from a client's to the root is looked up, so that every CA needs its list."""
    content = read_file("--tls-crl", path)
    if OTHER_BLOCK.search(content):
        raise StartupError(f"--tls-crl {path}: it holds something else than revocation lists")  # it would be trusted
    with _fault("--tls-crl", path, "there is no proper PEM revocation list in it"):
        lists = [x509.load_pem_x509_crl(block) for block in CRL_BLOCK.findall(content)]
    if not lists:
        raise StartupError(f"--tls-crl {path}: there is no PEM revocation list in it")
    for crl in lists:
        _check_times(crl, path)
        if not any(_has_signed(authority, crl) for authority in authorities):
            raise StartupError(f"--tls-crl {path}: a list in it is not signed by a CA in --tls-ca")
    for authority in authorities:
        if not any(_has_signed(authority, crl) for crl in lists):
            name = authority.subject.rfc4514_string()
            raise StartupError(f"--tls-crl {path}: it has no list of the CA {name!r}, so its clients would be refused")
    with _fault("--tls-crl", path, "TLS does not take it"):
        context.load_verify_locations(cafile=path)
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN


def _check_times(crl: x509.CertificateRevocationList, path: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if crl.next_update_utc is not None and crl.next_update_utc < now:
        raise StartupError(f"--tls-crl {path}: a list in it expired at {crl.next_update_utc:%F %T} UTC")
    if crl.last_update_utc > now:
        raise StartupError(f"--tls-crl {path}: a list in it is not valid before {crl.last_update_utc:%F %T} UTC")


def _has_signed(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    if authority.subject != crl.issuer:
        return False
    try:
        return crl.is_signature_valid(authority.public_key())  # type: ignore[arg-type]  # others raise TypeError
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False


def subject_name(certificate: Mapping[str, Any] | None) -> str:
    """Common name, else first alternative name, else serial number of a verified certificate; "" = there is none.

    `certificate` is as `ssl.SSLSocket.getpeercert()` gives it. The name is printable and at most 64 characters; one
    that had to be changed for it ends with a digest, so that two clients never share a name by that.
    """
    if not certificate:
        return ""
    common = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    others = [value for _, value in certificate.get("subjectAltName", ()) if isinstance(value, str)]
    name = next((name for name in [*common[-1:], *others] if name), f"serial {certificate.get('serialNumber', '?')}")
    if len(name) <= MAX_NAME_CHARS and name.isprintable():
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]
    shown = "".join(char if char.isprintable() else "?" for char in name)
    return f"{shown[: MAX_NAME_CHARS - len(digest) - 1]}#{digest}"
